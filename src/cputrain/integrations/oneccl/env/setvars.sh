# Sourced by the guides' commands: lets mpirun and oneCCL be found where pip installed them (the extra "oneccl").
I_MPI_ROOT=$(python3 -c 'import sys; print(sys.prefix)') || return 1
export I_MPI_ROOT
export PATH="$I_MPI_ROOT/bin:$PATH"
export LD_LIBRARY_PATH="$I_MPI_ROOT/lib:$I_MPI_ROOT/lib/ccl/cpu/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
