// What a library takes aligned memory from, exchanged for one that leaves nothing over.
//
// For a block at a multiple of 64, glibc's posix_memalign takes 96 bytes more than asked for, and
// frees what lies before and behind the block. These remnants get into caches for small blocks, are
// given to callers that want a few bytes, and stay where they are: a freed block no longer has room
// for the next one of its own size. A training frees and takes the same sizes in every step.
#include <elf.h>
#include <link.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "visibility.h"

namespace {

constexpr size_t kAlignment = 64, kHeader = 8;  // glibc's, before each block
constexpr size_t kLeast = 1024;                 // smaller ones have bins of their own
constexpr size_t kMapped = 32 << 20;            // from here on a block is mapped (memory.py)

using Aligned = int(void**, size_t, size_t);

// Every place where `library` keeps the address of `function`; those are all set to `to`.
struct Exchange {
  const char *library, *function;
  void* to;
  int64_t places;
};

struct Table {
  const ElfW(Rela) * entries;
  size_t bytes;
};

#if defined(__x86_64__)
bool is_address_of_a_function(uint64_t kind) {
  return kind == R_X86_64_JUMP_SLOT || kind == R_X86_64_GLOB_DAT;
}
#else
bool is_address_of_a_function(uint64_t) { return false; }
#endif

// Addresses in a loaded library's dynamic section are absolute with glibc, relative with others.
template <class T>
const T* at(const dl_phdr_info& library, uint64_t address) {
  return (const T*)(address < library.dlpi_addr ? library.dlpi_addr + address : address);
}

int exchange_in(dl_phdr_info* library, size_t, void* argument) {
  Exchange& wanted = *(Exchange*)argument;
  const char* name = strrchr(library->dlpi_name, '/');
  if (!name || strcmp(name + 1, wanted.library)) return 0;
  const ElfW(Dyn)* dynamic = nullptr;
  uint64_t closed_from = 0, closed_to = 0;  // what the loader has made read-only
  for (int i = 0; i < library->dlpi_phnum; i++) {
    const ElfW(Phdr) & part = library->dlpi_phdr[i];
    if (part.p_type == PT_DYNAMIC) dynamic = (const ElfW(Dyn)*)(library->dlpi_addr + part.p_vaddr);
    if (part.p_type == PT_GNU_RELRO) {
      closed_from = library->dlpi_addr + part.p_vaddr;
      closed_to = closed_from + part.p_memsz;
    }
  }
  if (!dynamic) return 1;
  Table tables[2] = {};
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  for (; dynamic->d_tag != DT_NULL; dynamic++) {
    const uint64_t value = dynamic->d_un.d_ptr;
    if (dynamic->d_tag == DT_JMPREL) tables[0].entries = at<ElfW(Rela)>(*library, value);
    if (dynamic->d_tag == DT_PLTRELSZ) tables[0].bytes = value;
    if (dynamic->d_tag == DT_RELA) tables[1].entries = at<ElfW(Rela)>(*library, value);
    if (dynamic->d_tag == DT_RELASZ) tables[1].bytes = value;
    if (dynamic->d_tag == DT_SYMTAB) symbols = at<ElfW(Sym)>(*library, value);
    if (dynamic->d_tag == DT_STRTAB) names = at<char>(*library, value);
  }
  if (!symbols || !names) return 1;
  for (const Table& table : tables)
    for (size_t i = 0; table.entries && i < table.bytes / sizeof(ElfW(Rela)); i++) {
      const ElfW(Rela) & entry = table.entries[i];
      if (!is_address_of_a_function(ELF64_R_TYPE(entry.r_info))) continue;
      if (strcmp(names + symbols[ELF64_R_SYM(entry.r_info)].st_name, wanted.function)) continue;
      const uint64_t place = library->dlpi_addr + entry.r_offset;
      if (place >= closed_from && place < closed_to) continue;
      __atomic_store_n((void**)place, wanted.to, __ATOMIC_RELEASE);
      wanted.places++;
    }
  return 1;
}

// Blocks whose sizes, header included, are multiples of the alignment lie side by side: once one of
// them is aligned, so is the next, and malloc's is nearly always right.
int aligned_block(void** block, size_t alignment, size_t size) {
  const size_t whole = (size + kHeader + kAlignment - 1) / kAlignment * kAlignment - kHeader;
  if (alignment != kAlignment || size < kLeast || size >= kMapped)
    return posix_memalign(block, alignment, size);
  void* const found = malloc(whole);
  if (found && (uintptr_t)found % kAlignment == 0) {
    *block = found;
    return 0;
  }
  free(found);
  return posix_memalign(block, alignment, whole);
}

}  // namespace

// From now on `library` (its file's name) takes aligned blocks from here, or again from glibc. They
// may be freed by free() in either case. Answers in how many places that was written; none if the
// library isn't loaded, or has no address that can be changed.
CPUTRAIN_EXPORT void cputrain_aligned_blocks(const char* library, int64_t ours, int64_t* places) {
  Aligned* const function = ours ? aligned_block : posix_memalign;
  Exchange exchange{library, "posix_memalign", (void*)function, 0};
  dl_iterate_phdr(exchange_in, &exchange);
  *places = exchange.places;
}
