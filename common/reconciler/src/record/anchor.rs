//! The anchor: a ConfigMap on the member that owns the state that Krypton can recreate.
//!
//! The owner references let the garbage collector delete that state with the anchor. It does the same after a restore,
//! which gives all objects new UIDs. The anchor therefore owns only the record of the desired state. It does not own:
//!
//! - A saved Tenant, which exists nowhere else while it waits to be restored.
//! - The Lease. Without it, a second writer could start next to the first one.
//! - The agent's identity. You would have to request a new one.
//! - The copy of an unreadable Secret, which is all that is left of a release's record.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use krypton_runtime::call::{ApiError, call_within};
use krypton_runtime::lease::SYSTEM_NAMESPACE;
use krypton_types::error_chain::chain;
use kube::Client;
use kube::api::{Api, PostParams};
use thiserror::Error;

/// Name of the anchor's ConfigMap.
pub const ANCHOR_NAME: &str = "krypton-root-owner";
const LABEL: (&str, &str) = ("app.kubernetes.io/managed-by", "krypton");
const ANNOTATIONS: [(&str, &str); 2] = [
    ("mesh.openkcm.io/anchor", "true"),
    (
        "mesh.openkcm.io/description",
        "Owns Krypton's record of the desired state of this cluster, Secret krypton-desired-state, which Krypton \
         recreates. Deleting this ConfigMap deletes only that record. Tenants, releases and objects of charts stay.",
    ),
];
/// Deadline of each call. The write of the desired state waits for it.
const CALL_DEADLINE: Duration = Duration::from_secs(3);

/// Reason why there is no anchor. No other operation depends on the anchor.
#[derive(Debug, Error)]
pub enum AnchorError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error("ConfigMap {SYSTEM_NAMESPACE}/{ANCHOR_NAME} is being deleted")]
    Terminating,
}

/// Creates or updates the anchor, and returns the owner reference for its dependents.
pub async fn ensure(client: &Client) -> Result<OwnerReference, AnchorError> {
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let params = PostParams::default();
    let attempt = |verb| format!("{verb} ConfigMap {SYSTEM_NAMESPACE}/{ANCHOR_NAME}");
    let existing = call_within(CALL_DEADLINE, attempt("reading"), api.get_opt(ANCHOR_NAME)).await?;
    let anchor = match existing {
        None => {
            let mut new = with_metadata(&ConfigMap::default());
            new.metadata.name = Some(ANCHOR_NAME.to_owned());
            let creating = api.create(&params, &new);
            call_within(CALL_DEADLINE, attempt("creating"), creating).await?
        }
        Some(existing) if existing.metadata.deletion_timestamp.is_some() => {
            return Err(AnchorError::Terminating);
        }
        Some(existing) => {
            // The replacement carries the resourceVersion of the read.
            let next = with_metadata(&existing);
            if next != existing {
                let updating = api.replace(ANCHOR_NAME, &params, &next);
                let updated = call_within(CALL_DEADLINE, attempt("updating"), updating).await;
                // The anchor works without its label and annotations.
                if let Err(error) = updated {
                    tracing::debug!(error = %chain(&error), "the anchor lacks a label or an annotation");
                }
            }
            existing
        }
    };
    Ok(owner_reference(&anchor))
}

/// Adds missing labels and annotations, and keeps existing values.
fn with_metadata(anchor: &ConfigMap) -> ConfigMap {
    let mut next = anchor.clone();
    let add_missing = |map: &mut Option<BTreeMap<String, String>>, entries: &[(&str, &str)]| {
        for (key, value) in entries {
            let map = map.get_or_insert_default();
            map.entry((*key).to_owned())
                .or_insert_with(|| (*value).to_owned());
        }
    };
    add_missing(&mut next.metadata.labels, &[LABEL]);
    add_missing(&mut next.metadata.annotations, &ANNOTATIONS);
    next
}

fn owner_reference(anchor: &ConfigMap) -> OwnerReference {
    OwnerReference {
        api_version: "v1".to_owned(),
        kind: "ConfigMap".to_owned(),
        name: ANCHOR_NAME.to_owned(),
        uid: anchor.metadata.uid.clone().unwrap_or_default(),
        ..OwnerReference::default()
    }
}

/// Returns the owner references with this anchor instead of any previous one. Other owners stay.
pub fn with_anchor(owners: &[OwnerReference], anchor: &OwnerReference) -> Vec<OwnerReference> {
    let is_anchor = |owner: &&OwnerReference| {
        (&owner.api_version, &owner.kind, &owner.name)
            == (&anchor.api_version, &anchor.kind, &anchor.name)
    };
    let anchors: Vec<&OwnerReference> = owners.iter().filter(is_anchor).collect();
    if anchors == [anchor] {
        return owners.to_vec();
    }
    let others = owners.iter().filter(|owner| !is_anchor(owner)).cloned();
    others.chain([anchor.clone()]).collect()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

    use super::*;

    fn anchor(uid: &str) -> ConfigMap {
        ConfigMap {
            metadata: ObjectMeta {
                uid: Some(uid.to_owned()),
                ..ObjectMeta::default()
            },
            ..ConfigMap::default()
        }
    }

    fn other() -> OwnerReference {
        OwnerReference {
            kind: "Backup".to_owned(),
            uid: "theirs".to_owned(),
            controller: Some(true),
            ..owner_reference(&anchor("x"))
        }
    }

    #[test]
    fn current_anchor_replaces_old_and_keeps_owners() {
        let (current, previous) = (
            owner_reference(&anchor("now")),
            owner_reference(&anchor("former")),
        );
        for (owners, expected) in [
            (vec![], vec![current.clone()]),
            (vec![current.clone()], vec![current.clone()]),
            (vec![previous.clone()], vec![current.clone()]),
            (
                vec![previous.clone(), current.clone()],
                vec![current.clone()],
            ),
            (vec![other()], vec![other(), current.clone()]),
            // The order of the owners alone causes no write.
            (
                vec![current.clone(), other()],
                vec![current.clone(), other()],
            ),
            (vec![previous, other()], vec![other(), current.clone()]),
        ] {
            assert_eq!(with_anchor(&owners, &current), expected, "{owners:?}");
        }
    }

    #[test]
    fn an_owner_neither_controls_nor_blocks() {
        let owner = owner_reference(&anchor("now"));
        assert_eq!((owner.controller, owner.block_owner_deletion), (None, None));
    }

    #[test]
    fn anchor_gains_missing_metadata_and_keeps_foreign() {
        let new = with_metadata(&anchor("now"));
        assert_eq!(with_metadata(&new), new, "once is enough");
        let entries = new.metadata.annotations.unwrap();
        assert_eq!(entries.len(), ANNOTATIONS.len());
        let mut foreign = anchor("now");
        foreign.metadata.labels = Some([("team".to_owned(), "a".to_owned())].into());
        foreign.metadata.annotations =
            Some([("mesh.openkcm.io/description".to_owned(), "ours".to_owned())].into());
        let next = with_metadata(&foreign);
        let labels = next.metadata.labels.unwrap();
        assert_eq!(labels["team"], "a");
        assert_eq!(labels[LABEL.0], LABEL.1);
        let annotations = next.metadata.annotations.unwrap();
        assert_eq!(annotations["mesh.openkcm.io/description"], "ours");
        assert_eq!(annotations["mesh.openkcm.io/anchor"], "true");
    }
}
