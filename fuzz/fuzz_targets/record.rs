#![no_main]

krypton_fuzz::target!(krypton_reconciler::fuzzing::record);
