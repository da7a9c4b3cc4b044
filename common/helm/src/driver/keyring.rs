//! Charts that prove themselves to helm by a key that is trusted.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use krypton_types::error_chain::chain;

use super::{Helm, HelmError, StopHandle, command};
use crate::chart::Prover;

/// Checking a signature takes helm a moment.
const TIMEOUT: Duration = Duration::from_secs(10);
/// It reads no cluster, so there is nothing of anybody's in its cache.
const CACHE_KEY: &str = "verify";

/// The keys by which charts are to be signed. The file is read again each time.
#[derive(Debug)]
pub struct Keyring {
    pub helm: Arc<Helm>,
    /// As `gpg --export` writes it.
    pub file: PathBuf,
}

impl Keyring {
    /// `helm verify`. It takes no slot: it is short, and each chart is proven once.
    async fn verify(&self, archive: &Path) -> Result<(), HelmError> {
        let helm = &self.helm;
        helm.check().await?;
        let run = helm.scratch.run(CACHE_KEY)?;
        let arguments = command::verify(archive, &self.file);
        // Nobody else would stop it; when this is dropped, it ends.
        let (_stop, signal) = StopHandle::new();
        let name = archive.file_name().unwrap_or_default();
        let name = name.to_string_lossy();
        let ending = helm
            .run(&name, &run, arguments, (TIMEOUT, true), None, &signal)
            .await?;
        helm.judge("verify", &name, ending, &[], TIMEOUT)
    }
}

impl Prover for Keyring {
    fn prove<'a>(&'a self, archive: &'a Path) -> BoxFuture<'a, Result<(), String>> {
        let proven = self.verify(archive).map(|proven| match proven {
            Ok(()) => Ok(()),
            Err(HelmError::Failed { complaint, .. }) => {
                Err(format!("its signature is not good: {complaint}"))
            }
            Err(error) => Err(format!("its signature was not checked: {}", chain(&error))),
        });
        proven.boxed()
    }
}
