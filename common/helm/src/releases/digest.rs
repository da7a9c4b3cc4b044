//! Digest of a release's effect: its manifest and its hooks.

use std::io::Read;

use k8s_openapi::api::core::v1::Secret;
use krypton_types::fingerprint::sha256_hex;
use serde::{Deserialize, Serialize};

use super::{ReleaseError, parse, payload, unreadable};

/// The fields that Helm acts on. Omits the status, times and the last run of a hook, because they change with
/// every operation.
#[derive(Deserialize, Serialize)]
struct DigestedRelease {
    #[serde(default)]
    name: String,
    #[serde(default)]
    namespace: String,
    manifest: Option<String>,
    hooks: Option<Vec<DigestedHook>>,
}

#[derive(Deserialize, Serialize)]
struct DigestedHook {
    #[serde(default)]
    name: String,
    #[serde(default)]
    kind: String,
    #[serde(default)]
    path: String,
    #[serde(default)]
    manifest: String,
    events: Option<Vec<String>>,
    #[serde(default)]
    weight: i64,
    delete_policies: Option<Vec<String>>,
    output_log_policies: Option<Vec<String>>,
}

/// Returns the digest of a release Secret: SHA-256 in hexadecimal.
///
/// # Errors
/// See [`super::decode`]. Does not check the name.
pub fn digest(secret: &Secret) -> Result<String, ReleaseError> {
    digest_of_json(payload(secret)?).map_err(|source| unreadable(secret, source))
}

/// Returns the digest of a release as `helm upgrade --output json` prints it.
///
/// # Errors
/// Returns an error if the text is not a release in JSON.
pub fn digest_of_json(release: impl Read) -> serde_json::Result<String> {
    let mut content: DigestedRelease = parse(release)?;
    // Helm omits empty fields in one place and writes null in another.
    content.manifest.get_or_insert_default();
    content.hooks.get_or_insert_default();
    Ok(sha256_hex(&serde_json::to_vec(&content)?))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::releases::packed_secret;

    fn release() -> Value {
        json!({
            "name": "shop", "namespace": "acme", "version": 3,
            "info": { "status": "deployed" },
            "manifest": "kind: ConfigMap\n",
            "hooks": [{
                "name": "clean", "kind": "Job", "path": "a.yaml", "manifest": "kind: Job",
                "events": ["pre-delete"], "weight": 1,
                "last_run": { "phase": "Succeeded" },
            }],
        })
    }

    fn digest_of_secret(release: &Value) -> String {
        digest(&packed_secret(&release.to_string())).unwrap()
    }

    #[test]
    fn digest_covers_all_that_helm_acts_on() {
        let original = digest_of_secret(&release());
        for (field, value) in [
            ("/name", json!("other")),
            ("/namespace", json!("other")),
            ("/manifest", json!("kind: Secret\n")),
            ("/hooks/0/manifest", json!("kind: Pod")),
            ("/hooks/0/events", json!(["post-delete"])),
            ("/hooks/0/weight", json!(2)),
            ("/hooks", json!([])),
        ] {
            let mut changed = release();
            *changed.pointer_mut(field).unwrap() = value;
            assert_ne!(digest_of_secret(&changed), original, "{field}");
        }
    }

    #[test]
    fn digest_ignores_status_and_hook_runs() {
        let mut later = release();
        later["info"]["status"] = json!("superseded");
        later["version"] = json!(4);
        later["hooks"][0]["last_run"]["phase"] = json!("Failed");
        assert_eq!(digest_of_secret(&later), digest_of_secret(&release()));
    }

    #[test]
    fn printed_release_has_the_digest_of_its_secret() {
        let printed = serde_json::to_vec_pretty(&release()).unwrap();
        assert_eq!(
            digest_of_json(printed.as_slice()).unwrap(),
            digest_of_secret(&release())
        );
        assert!(digest_of_json("Release \"shop\" has been upgraded".as_bytes()).is_err());
    }
}
