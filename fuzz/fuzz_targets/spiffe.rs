#![no_main]

krypton_fuzz::target!(krypton_common::fuzzing::spiffe);
