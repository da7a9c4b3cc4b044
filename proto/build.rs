//! Compiles the wire with protox: no protoc is needed.

use std::error::Error;

const FILES: [&str; 2] = [
    "krypton/fleet/v1/enrollment.proto",
    "krypton/fleet/v1/fleet.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    for file in FILES {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(FILES, ["."])?;
    tonic_prost_build::configure()
        .bytes(".krypton.fleet.v1")
        .btree_map(".krypton.fleet.v1")
        .compile_fds(descriptors)?;
    Ok(())
}
