//! Finds the join bundle and decides whether the agent must enroll.

use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::Secret;
use krypton_runtime::call::{ApiError, call};
use krypton_types::join_bundle::{BUNDLE_MAX_BYTES, BundleError, JoinBundle};
use kube::Client;
use kube::api::Api;
use thiserror::Error;
use zeroize::Zeroizing;

use crate::args::BundleSources;
use crate::credentials::identity::Enrolled;

/// Key of the bundle in its Secret.
pub const KEY: &str = "bundle.yaml";

/// Reason why the agent has no bundle. Each message names the source.
#[derive(Debug, Error)]
pub enum JoinError {
    #[error("reading the join bundle {} failed; check --join-file", .path.display())]
    File {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the join bundle {} cannot be used", .path.display())]
    FileContent {
        path: PathBuf,
        #[source]
        source: BundleError,
    },
    #[error("the join bundle in Secret {namespace}/{name} cannot be used")]
    SecretContent {
        namespace: String,
        name: String,
        #[source]
        source: BundleError,
    },
    #[error(
        "Secret {namespace}/{name} has no key {KEY}; put there what 'kubectl krypton join NAME' prints"
    )]
    NoKey { namespace: String, name: String },
    #[error(
        "this cluster has not joined a fleet: Secret {namespace}/{name} is missing; run 'kubectl krypton join NAME' on the home cluster, and pass its output with --join-file or as key {KEY} of that Secret"
    )]
    Missing { namespace: String, name: String },
    #[error(
        "the join bundle is not available; grant the right to get this Secret, or use --join-file"
    )]
    Api(#[from] ApiError),
}

impl JoinError {
    /// Returns whether a retry can succeed without a change by the user.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Api(error) if error.is_transient())
    }
}

impl BundleSources {
    /// Returns the bundle from the first configured source.
    pub async fn load(&self, client: &Client) -> Result<JoinBundle, JoinError> {
        match &self.file {
            Some(path) => from_file(path),
            None => self.read_secret(client).await,
        }
    }

    async fn read_secret(&self, client: &Client) -> Result<JoinBundle, JoinError> {
        let (namespace, name) = (self.namespace.clone(), self.secret.clone());
        let api: Api<Secret> = Api::namespaced(client.clone(), &namespace);
        let secret = call(
            format!("reading Secret {namespace}/{name}"),
            api.get_opt(&name),
        )
        .await?;
        let Some(secret) = secret else {
            return Err(JoinError::Missing { namespace, name });
        };
        let data = secret.data.unwrap_or_default();
        let Some(bytes) = data.get(KEY) else {
            return Err(JoinError::NoKey { namespace, name });
        };
        parse(&bytes.0).map_err(|source| JoinError::SecretContent {
            namespace,
            name,
            source,
        })
    }
}

fn from_file(path: &Path) -> Result<JoinBundle, JoinError> {
    let read = || {
        // Reading one byte beyond the limit detects excess; a pipe or device may never end.
        let limited = std::io::Read::take(std::fs::File::open(path)?, BUNDLE_MAX_BYTES as u64 + 1);
        let mut bytes = Zeroizing::new(Vec::new());
        std::io::copy(&mut std::io::BufReader::new(limited), &mut *bytes)?;
        Ok(bytes)
    };
    let bytes = read().map_err(|source| JoinError::File {
        path: path.to_owned(),
        source,
    })?;
    parse(&bytes).map_err(|source| JoinError::FileContent {
        path: path.to_owned(),
        source,
    })
}

fn parse(bytes: &[u8]) -> Result<JoinBundle, BundleError> {
    // Invalid UTF-8 is not valid YAML either, so the parser rejects it.
    JoinBundle::parse(&String::from_utf8_lossy(bytes))
}

/// Returns the public part of a token, which identifies it.
pub fn token_name(bundle: &JoinBundle) -> &str {
    bundle
        .token
        .split_once('.')
        .map_or("", |(name, _secret)| name)
}

#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "this cluster joined as {joined}, but the join bundle is for {wanted}, and release names contain that name; remove the bundle to stay {joined}. To join as {wanted}, delete Secret {namespace}/{}",
    crate::credentials::store::SECRET
)]
pub struct ClusterMismatch {
    joined: String,
    wanted: String,
    namespace: String,
}

/// Returns the bundle if the agent must enroll with it. The agent ignores the bundle of its current identity, and uses a
/// new one. Joining again thus helps if the hub has forgotten the cluster, has a new CA, or the certificate has expired.
pub fn bundle_to_enroll(
    enrolled: Option<&Enrolled>,
    bundle: Option<JoinBundle>,
    namespace: &str,
) -> Result<Option<JoinBundle>, ClusterMismatch> {
    match (enrolled.map(|enrolled| &enrolled.membership), bundle) {
        (Some(joined), Some(bundle)) if joined.cluster != bundle.cluster => Err(ClusterMismatch {
            joined: joined.cluster.clone(),
            wanted: bundle.cluster.clone(),
            namespace: namespace.to_owned(),
        }),
        (Some(joined), Some(bundle)) if joined.token_name == token_name(&bundle) => Ok(None),
        (_, bundle) => Ok(bundle),
    }
}

#[cfg(test)]
mod tests {
    use krypton_types::error_chain::chain;
    use rustls::pki_types::CertificateDer;

    use super::*;
    use crate::credentials::identity::Membership;
    use crate::fake_hub::FakeAuthority;

    fn bundle(cluster: &str, token: char) -> JoinBundle {
        JoinBundle {
            cluster: cluster.to_owned(),
            addresses: vec!["hub:7443".to_owned()],
            certificate_authority: FakeAuthority::new().root_pem,
            token: format!("{}.{}", token.to_string().repeat(16), "0".repeat(64)),
            expires: jiff::Timestamp::from_second(1_800_000_000).unwrap(),
        }
    }

    fn enrolled(bundle: &JoinBundle) -> Enrolled {
        Enrolled {
            certificates: vec![CertificateDer::from(vec![1])],
            roots: Vec::new(),
            membership: Membership {
                cluster: bundle.cluster.clone(),
                addresses: bundle.addresses.clone(),
                token_name: token_name(bundle).to_owned(),
            },
            not_before: jiff::Timestamp::UNIX_EPOCH,
            not_after: jiff::Timestamp::UNIX_EPOCH,
        }
    }

    #[test]
    fn bundle_enrolls_once_and_new_bundle_enrolls_again() {
        let old = bundle("edge-1", 'a');
        let identity = enrolled(&old);
        let enrolls = |enrolled, bundle| {
            let bundle = bundle_to_enroll(enrolled, bundle, "krypton-system");
            bundle.unwrap().is_some()
        };
        assert!(enrolls(None, Some(old.clone())));
        assert!(!enrolls(Some(&identity), None));
        assert!(!enrolls(Some(&identity), Some(old)));
        assert!(enrolls(Some(&identity), Some(bundle("edge-1", 'b'))));
    }

    #[test]
    fn bundle_for_another_cluster_is_rejected_naming_both() {
        let identity = enrolled(&bundle("edge-1", 'a'));
        let other = bundle("edge-2", 'b');
        let result = bundle_to_enroll(Some(&identity), Some(other), "krypton-system");
        let message = result.unwrap_err().to_string();
        for part in ["edge-1", "edge-2", "krypton-system/krypton-agent-identity"] {
            assert!(message.contains(part), "{part}: {message}");
        }
    }

    #[test]
    fn missing_truncated_or_endless_bundle_file_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bundle.yaml");
        let error_text = |path: &Path| chain(&from_file(path).unwrap_err());
        assert!(error_text(&path).contains(path.to_str().unwrap()));
        let yaml = bundle("edge-1", 'a').to_yaml().unwrap();
        std::fs::write(&path, yaml.get(..yaml.len() / 2).unwrap()).unwrap();
        let text = error_text(&path);
        assert!(
            text.contains(path.to_str().unwrap()) && text.contains("join"),
            "{text}"
        );
        assert!(error_text(Path::new("/dev/zero")).contains("larger than"));
        std::fs::write(&path, &yaml).unwrap();
        assert_eq!(from_file(&path).unwrap(), JoinBundle::parse(&yaml).unwrap());
    }
}
