//! Writes `crds/<plural>.<group>.yaml` again, and the charts' copies: `cargo run -p krypton-crds --example
//! crdgen`.

use std::{fs, io, path::Path};

fn main() -> io::Result<()> {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (name, yaml) in krypton_crds::manifests() {
        let copies = ["krypton-hub", "krypton-agent"].map(|chart| {
            let folder = format!("../charts/{chart}/crd-files");
            crate_folder.join(folder).join(&name)
        });
        // A chart has a file for each CRD that it installs.
        let copies = copies.into_iter().filter(|copy| copy.exists());
        for path in copies.chain([crate_folder.join("crds").join(&name)]) {
            fs::write(&path, &yaml)?;
            println!("{}", path.display());
        }
    }
    Ok(())
}
