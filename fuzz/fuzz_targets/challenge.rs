#![no_main]

krypton_fuzz::target!(krypton_helm::fuzzing::challenge);
