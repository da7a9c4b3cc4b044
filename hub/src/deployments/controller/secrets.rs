//! The kubeconfig Secrets that discovery reads for KryptonDeployments.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use krypton_types::deployment::DeploymentKey;
use krypton_types::names;

use super::{DeploymentController, DeploymentEntry, DeploymentStore, recorded_placements};
use crate::deployments::target::{TargetReference, is_trusted, target_reference};
use crate::discovery::SourceKind;
use crate::discovery::named_secrets::{SecretName, SecretReference};

/// Maximum number of untrusted Secrets to read. An object may name them only if the Secret itself permits
/// it.
const UNTRUSTED_MAX: usize = 1_000;

impl DeploymentStore {
    /// Returns all named Secrets, and the Secrets of members that still have releases.
    pub(super) fn referenced_secrets(
        &self,
        by_age: &[(&DeploymentKey, &DeploymentEntry)],
        controller: &DeploymentController,
    ) -> BTreeMap<SecretName, SecretReference> {
        let mut references: BTreeMap<SecretName, SecretReference> = BTreeMap::new();
        let mut untrusted_count = 0;
        let mut add = |secret: SecretName, key: Option<String>, is_trusted: bool| {
            if secret.name == names::SELF_CLUSTER {
                return;
            }
            let reference = match references.entry(secret) {
                Entry::Occupied(reference) => reference.into_mut(),
                // Limits how many Secrets an object outside their namespaces can make the hub read.
                Entry::Vacant(_) if !is_trusted && untrusted_count >= UNTRUSTED_MAX => return,
                Entry::Vacant(reference) => {
                    untrusted_count += usize::from(!is_trusted);
                    reference.insert(SecretReference::default())
                }
            };
            // The oldest object determines the key. A trusted object precedes any untrusted one.
            if is_trusted && !reference.trusted {
                *reference = SecretReference { key, trusted: true };
            } else if is_trusted == reference.trusted {
                reference.key = reference.key.take().or(key);
            }
        };
        for (key, entry) in by_age {
            for placement in recorded_placements(&entry.object) {
                let Some(member) = self.members.get(&placement.cluster) else {
                    continue;
                };
                if member.cluster_uid.as_ref() == Some(&placement.cluster_uid)
                    && let Some(source) = &member.source
                    && source.kind == SourceKind::Secret.as_str()
                    && let (Some(namespace), Some(name)) = (&source.namespace, &source.name)
                {
                    let (namespace, name) = (namespace.clone(), name.clone());
                    add(SecretName { namespace, name }, placement.key.clone(), true);
                }
            }
            if let TargetReference::Secret {
                secret,
                key: secret_key,
                ..
            } = target_reference(&entry.object.spec, &controller.discovery_namespace)
            {
                let is_trusted = is_trusted(&secret, &key.namespace, &controller.open_namespaces);
                add(secret, secret_key, is_trusted);
            }
        }
        references
    }
}
