//! The files of a support bundle, limited in size, and a list of missing ones.

use std::io;

use flate2::Compression;
use flate2::write::GzEncoder;
use jiff::Timestamp;

/// Maximum size of all files, unpacked.
const MAX_BYTES: usize = 64 << 20;

pub(super) struct BundleContents {
    context: String,
    created: Timestamp,
    files: Vec<(String, String)>,
    missing: Vec<(String, String)>,
    bytes_left: usize,
}

impl BundleContents {
    pub(super) fn new(context: &str, created: Timestamp) -> Self {
        Self {
            context: context.to_owned(),
            created,
            files: Vec::new(),
            missing: Vec::new(),
            bytes_left: MAX_BYTES,
        }
    }

    /// Adds a file, or notes it as missing if the bundle is full.
    pub(super) fn add(&mut self, name: &str, text: String) {
        match self.bytes_left.checked_sub(text.len()) {
            Some(bytes_left) => {
                self.bytes_left = bytes_left;
                self.files.push((name.to_owned(), text));
            }
            None => self.add_missing(name, "no space left in the bundle"),
        }
    }

    pub(super) fn add_missing(&mut self, name: &str, reason: &str) {
        self.missing.push((name.to_owned(), reason.to_owned()));
    }

    pub(super) fn missing_count(&self) -> usize {
        self.missing.len()
    }

    fn readme(&self) -> String {
        let mut text = format!(
            "Support bundle of the cluster {}, created on {} by kubectl-krypton {}.\n\n\
             Chart values, the content of Secrets, and text that resembles a password or token are left out or hidden. \
             Names of clusters, namespaces, Tenants and machines are not. Read the bundle before you pass it on.\n\nFiles:\n",
            self.context,
            self.created,
            env!("CARGO_PKG_VERSION"),
        );
        for (name, _) in &self.files {
            text += &format!("  {name}\n");
        }
        if !self.missing.is_empty() {
            text += "\nMissing:\n";
        }
        for (name, reason) in &self.missing {
            text += &format!("  {name}: {reason}\n");
        }
        text
    }

    /// Packs all into one archive, with README.txt first.
    pub(super) fn write(self, to: impl io::Write) -> io::Result<()> {
        let mut archive = tar::Builder::new(GzEncoder::new(to, Compression::default()));
        let readme = ("README.txt".to_owned(), self.readme());
        for (name, text) in [readme].iter().chain(&self.files) {
            let mut header = tar::Header::new_gnu();
            header.set_size(text.len() as u64);
            header.set_mode(0o600);
            header.set_mtime(u64::try_from(self.created.as_second()).unwrap_or_default());
            let path = format!("krypton-support/{name}");
            archive.append_data(&mut header, path, text.as_bytes())?;
        }
        archive.into_inner()?.finish()?;
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;
    use std::io::Read;

    use super::*;

    pub(crate) fn unpacked(packed: impl Read) -> BTreeMap<String, String> {
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(packed));
        let entries = archive.entries().unwrap().map(|entry| {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().display().to_string();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            (name.replace("krypton-support/", ""), text)
        });
        entries.collect()
    }

    #[test]
    fn bundle_readme_lists_included_and_missing_files() {
        let mut contents = BundleContents::new("home", Timestamp::UNIX_EPOCH);
        contents.add("tenants.yaml", "kind: List\n".to_owned());
        contents.add_missing("crds.yaml", "you may not list them");
        contents.add("a/large.log", "x".repeat(MAX_BYTES));
        contents.add("a/small.log", "said\n".to_owned());
        assert_eq!(contents.missing_count(), 2);
        let mut packed = Vec::new();
        contents.write(&mut packed).unwrap();
        let files = unpacked(packed.as_slice());
        let names: Vec<&str> = files.keys().map(String::as_str).collect();
        assert_eq!(names, ["README.txt", "a/small.log", "tenants.yaml"]);
        let readme = &files["README.txt"];
        for line in [
            "  tenants.yaml\n",
            "  a/small.log\n",
            "  crds.yaml: you may not list them\n",
            "  a/large.log: no space left in the bundle\n",
        ] {
            assert!(readme.contains(line), "{readme}");
        }
    }
}
