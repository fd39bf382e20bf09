"""Trainings on clusters: manifests for Kubeflow's operators, batch scripts for Slurm, images, and `kubectl`."""
