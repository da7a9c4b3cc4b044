//! Verifies chart signatures with Helm and a keyring of trusted keys.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use krypton_types::error_chain::chain;

use super::{Helm, HelmError, StopHandle, command};
use crate::chart::Prover;

/// Timeout of a verification.
const TIMEOUT: Duration = Duration::from_secs(10);
/// `helm verify` reads no cluster, so its cache contains no member's data.
const CACHE_KEY: &str = "verify";

/// The keys that may sign charts. Each verification reads the file again.
#[derive(Debug)]
pub struct Keyring {
    pub helm: Arc<Helm>,
    /// The keyring in the format of `gpg --export`.
    pub file: PathBuf,
}

impl Keyring {
    /// Runs `helm verify`. It takes no slot, because it is short and runs once per chart.
    async fn verify(&self, archive: &Path) -> Result<(), HelmError> {
        let helm = &self.helm;
        helm.check().await?;
        let run = helm.scratch.run(CACHE_KEY)?;
        let arguments = command::verify(archive, &self.file);
        // No other code stops this run. Dropping the handle ends it.
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
