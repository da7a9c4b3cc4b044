#![no_main]

krypton_fuzz::target!(krypton_types::fuzzing::kubeconfig);
