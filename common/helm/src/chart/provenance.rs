//! Verifies charts with Helm's provenance files: a chart needs a signature of a trusted key.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::future::BoxFuture;
use krypton_runtime::off_thread;

use super::archive::ChartMetadata;
use super::error::ChartProblem;
use super::files::PARTIAL;

/// Suffix of the archive's name.
pub(super) const SUFFIX: &str = ".prov";
/// Size limit. The file holds a `Chart.yaml`, a digest and a signature.
pub(crate) const LIMIT: u64 = 1 << 20;

/// Verifies the signature of a chart.
pub trait SignatureVerifier: Send + Sync {
    /// Verifies an archive with the provenance file next to it. The error text completes a sentence.
    fn verify<'a>(&'a self, archive: &'a Path) -> BoxFuture<'a, Result<(), String>>;
}

/// Gets the provenance file only if it is `needed`. Returns `None` if it does not exist, and every other
/// failure as an error.
pub(super) async fn fetch_if(
    needed: bool,
    fetch: impl Future<Output = Result<Vec<u8>, ChartProblem>>,
) -> Result<Option<Vec<u8>>, ChartProblem> {
    if !needed {
        return Ok(None);
    }
    match fetch.await {
        Ok(bytes) => Ok(Some(bytes)),
        Err(ChartProblem::Refused { status: 404, .. }) => Ok(None),
        Err(ChartProblem::Local(error)) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(problem) => Err(problem),
    }
}

/// A chart whose signature must be verified.
pub(super) struct SignedChart<'a> {
    /// Folder of the cache.
    pub dir: PathBuf,
    pub metadata: &'a ChartMetadata,
    pub archive: Arc<Vec<u8>>,
    pub provenance: Option<Vec<u8>>,
}

impl SignedChart<'_> {
    pub(super) async fn verify(self, verifier: &dyn SignatureVerifier) -> Result<(), ChartProblem> {
        let Some(provenance) = self.provenance else {
            let problem = format!("the repository has no provenance file ({SUFFIX}) for it");
            return Err(ChartProblem::UnverifiedSignature(problem));
        };
        // The name that `helm package` signed, regardless of the current name.
        let name = format!("{}-{}.tgz", self.metadata.name, self.metadata.version);
        let (dir, archive) = (self.dir.clone(), self.archive);
        let files = off_thread::run(move || {
            let folder = tempfile::Builder::new().prefix(PARTIAL).tempdir_in(&dir)?;
            let path = folder.path().join(&name);
            // The check of the archive validates names, but a name with a separator would lead to another
            // folder.
            if path.parent() != Some(folder.path()) {
                return Err(std::io::Error::other("its name is not a file name"));
            }
            std::fs::write(folder.path().join(format!("{name}{SUFFIX}")), provenance)?;
            std::fs::write(&path, archive.as_slice())?;
            Ok((folder, path))
        });
        let (_folder, path) = files.await.map_err(|source| ChartProblem::Store {
            dir: self.dir,
            source,
        })?;
        let verified = verifier.verify(&path).await;
        verified.map_err(ChartProblem::UnverifiedSignature)
    }
}
