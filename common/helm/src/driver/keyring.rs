//! Verifies chart signatures with Helm and a keyring of trusted keys.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use krypton_types::error_chain::chain;

use super::{Helm, HelmError, RunParams, StopHandle, command};
use crate::chart::SignatureVerifier;

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
    async fn run_helm_verify(&self, archive: &Path) -> Result<(), HelmError> {
        let helm = &self.helm;
        let folder = helm.prepare_run(CACHE_KEY).await?;
        let arguments = command::verify(archive, &self.file);
        // No other code stops this run. Dropping the handle ends it.
        let (_stop, signal) = StopHandle::new();
        let name = archive.file_name().unwrap_or_default();
        let name = name.to_string_lossy();
        let params = RunParams::new("verify", &name, TIMEOUT);
        helm.run(None, &folder, arguments, params, &signal).await
    }
}

impl SignatureVerifier for Keyring {
    fn verify<'a>(&'a self, archive: &'a Path) -> BoxFuture<'a, Result<(), String>> {
        let verified = self.run_helm_verify(archive).map(|result| match result {
            Ok(()) => Ok(()),
            Err(HelmError::Failed { message, .. }) => {
                Err(format!("its signature is not good: {message}"))
            }
            Err(error) => Err(format!("its signature was not checked: {}", chain(&error))),
        });
        verified.boxed()
    }
}
