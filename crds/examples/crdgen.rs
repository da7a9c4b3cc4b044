//! Writes `crds/<plural>.<group>.yaml` anew: `cargo run -p krypton-crds --example crdgen`.

use std::{fs, io, path::Path};

fn main() -> io::Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("crds");
    fs::create_dir_all(&folder)?;
    for (name, yaml) in krypton_crds::manifests() {
        fs::write(folder.join(&name), yaml)?;
        println!("crds/{name}");
    }
    Ok(())
}
