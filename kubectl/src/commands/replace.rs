//! `kubectl krypton join NAME --replace`: deletes the EdgeCluster and creates it again with the same spec. This clears the
//! recorded cluster and certificate, so the rebuilt cluster can take the name.

use std::time::Duration;

use jiff::Timestamp;
use krypton_crds::edge_cluster::{DeletionPolicy, EdgeCluster, EdgeClusterStatus};
use krypton_types::names::{ORPHAN_ANNOTATION, UNINSTALL_FINALIZER};
use kube::ResourceExt as _;
use kube::api::{DynamicObject, ObjectMeta, Patch};
use serde_json::json;

use crate::error::KubectlError;
use crate::home::Connection;
use crate::kind::Kind;
use crate::objects::Objects;
use crate::render::decode;

const DEADLINE: Duration = Duration::from_secs(30);
const INTERVAL: Duration = Duration::from_millis(250);
/// Attempts to create the EdgeCluster while another process creates it too.
const MAX_ATTEMPTS: usize = 3;

/// An EdgeCluster to replace, as it was read.
#[derive(Debug)]
pub(crate) struct ReplacedMember {
    name: String,
    /// Untyped, to keep fields of a later version.
    object: DynamicObject,
    typed_object: Option<EdgeCluster>,
}

impl ReplacedMember {
    pub(crate) async fn read(home: &Connection, name: &str) -> Result<Self, KubectlError> {
        match home.members().find(name).await? {
            Some(object) => Ok(Self::new(name, object)),
            None => Err(KubectlError::NotFound(format!(
                "EdgeCluster {name} does not exist; omit --replace to let a new cluster join under that name"
            ))),
        }
    }

    fn new(name: &str, object: DynamicObject) -> Self {
        let value = serde_json::to_value(&object).unwrap_or_default();
        Self {
            name: name.to_owned(),
            typed_object: decode(&value),
            object,
        }
    }

    /// Returns whether an agent must enroll. Otherwise, the hub finds the new cluster through its source.
    pub(crate) fn needs_bundle(&self) -> bool {
        self.typed_object
            .as_ref()
            .is_none_or(|object| self.has_enrolled() || object.spec.source_ref.is_none())
    }

    fn status(&self) -> Option<&EdgeClusterStatus> {
        self.typed_object.as_ref()?.status.as_ref()
    }

    /// Returns whether an agent has a certificate for it, even if the agent has not yet connected with it.
    fn has_enrolled(&self) -> bool {
        self.status().is_some_and(|status| {
            status.certificate_expiry.is_some() || status.pending_certificate_expiry.is_some()
        })
    }

    /// Deletes the EdgeCluster and creates it again.
    pub(crate) async fn replace(&self, home: &Connection) -> Result<(), KubectlError> {
        let (members, name) = (home.members(), &self.name);
        let explain_conflict = |error: KubectlError| match error.code() {
            Some(404 | 409) => KubectlError::Refused(format!(
                "EdgeCluster {name} has changed since this command read it; check it and retry"
            )),
            _ => error,
        };
        self.request_orphaning(&members)
            .await
            .map_err(explain_conflict)?;
        let deleting = members.delete(name, self.object.uid());
        deleting.await.map_err(explain_conflict)?;
        self.wait_until_gone(&members).await?;
        self.create(&members).await.map_err(|source| {
            let manifest = self.manifest();
            KubectlError::Interrupted {
                consequence: format!(
                    "EdgeCluster {name} was deleted and not created again; create it with 'kubectl create -f -' from this: {manifest}"
                ),
                source: Box::new(source),
            }
        })
    }

    /// Makes the deletion keep all releases, regardless of the `deletionPolicy`: the cluster still exists.
    async fn request_orphaning(
        &self,
        members: &Objects<DynamicObject>,
    ) -> Result<(), KubectlError> {
        let spec = self.typed_object.as_ref().map(|object| &object.spec);
        let uninstalls = spec.is_none_or(|spec| spec.deletion_policy != DeletionPolicy::Retain);
        if !uninstalls && !self.object.finalizers().iter().any(is_hub_finalizer) {
            return Ok(());
        }
        let uid = self.object.uid();
        let annotations = json!({ ORPHAN_ANNOTATION: "true" });
        let patch = json!({"metadata": {"uid": uid, "annotations": annotations}});
        members
            .patch(&self.name, &Patch::Merge(patch))
            .await
            .map(drop)
    }

    async fn wait_until_gone(&self, members: &Objects<DynamicObject>) -> Result<(), KubectlError> {
        let name = &self.name;
        let held_error = |finalizers: &[String]| {
            let manifest = self.manifest();
            KubectlError::Refused(format!(
                "EdgeCluster {name} is being deleted and waits for its finalizers {finalizers:?}; have their owners remove them (a running hub removes {UNINSTALL_FINALIZER}), then create it again with 'kubectl create -f -' from this: {manifest}"
            ))
        };
        let check = |member: Option<DynamicObject>| {
            let Some(member) = member.filter(|member| member.uid() == self.object.uid()) else {
                return Ok(Some(()));
            };
            match member.finalizers().iter().all(is_hub_finalizer) {
                true => Ok(None),
                false => Err(held_error(member.finalizers())),
            }
        };
        let deleted = members.wait_for(name, (INTERVAL, DEADLINE), check).await?;
        deleted.ok_or_else(|| held_error(&[UNINSTALL_FINALIZER.to_owned()]))
    }

    async fn create(&self, members: &Objects<DynamicObject>) -> Result<(), KubectlError> {
        let new = self.new_object();
        let patch = Patch::Merge(json!({
            "metadata": {"labels": new.metadata.labels, "annotations": new.metadata.annotations},
            "spec": new.data.get("spec"),
        }));
        let mut attempt = 1;
        loop {
            match members.create(&self.name, &new).await {
                // An enrolling agent, or a hub that has not seen the deletion, created it with another spec.
                Err(error) if error.code() == Some(409) => {}
                created => return created,
            }
            match members.patch(&self.name, &patch).await {
                Err(error) if error.code().is_some() && attempt < MAX_ATTEMPTS => attempt += 1,
                patched => return patched.map(drop),
            }
        }
    }

    /// The object without the fields that the API server and the hub write.
    fn new_object(&self) -> DynamicObject {
        let spec = self.object.data.get("spec").cloned();
        let mut annotations = self.object.metadata.annotations.clone();
        // An earlier attempt may have added it, for the old object only.
        if let Some(annotations) = &mut annotations {
            annotations.remove(ORPHAN_ANNOTATION);
        }
        DynamicObject {
            types: self.object.types.clone(),
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                labels: self.object.metadata.labels.clone(),
                annotations,
                ..ObjectMeta::default()
            },
            data: json!({ "spec": spec.unwrap_or_else(|| json!({})) }),
        }
    }

    fn manifest(&self) -> String {
        let kind = Kind::Cluster.resource();
        let mut manifest = serde_json::to_value(self.new_object()).unwrap_or_default();
        manifest["apiVersion"] = kind.api_version.into();
        manifest["kind"] = kind.kind.into();
        manifest.to_string()
    }

    /// Describes the replacement and its effects on the previous cluster.
    pub(crate) fn effects(&self, now: Timestamp) -> String {
        let name = &self.name;
        let uid = self.object.uid().unwrap_or_default();
        let mut text = format!(
            "EdgeCluster {name} (UID {uid}) was deleted and created again at {now} with the same spec, labels and annotations.\n\
             It has no recorded cluster now: it records the next one that answers under the name {name}.\n"
        );
        let previous = self
            .status()
            .and_then(|status| status.cluster_uid.as_deref());
        if let Some(previous) = previous {
            text += &format!(
                "The previous cluster (UID {previous}) has left the fleet. If it still runs, its releases and Tenants stay there, and nothing is uninstalled.\n"
            );
        }
        if self.has_enrolled() {
            text += "The certificate of its previous agent is void. If that agent still runs, it keeps its last desired state: stop it.\n";
        }
        let spec = self.typed_object.as_ref().map(|object| &object.spec);
        if spec.is_some_and(|spec| spec.banned) {
            text += &format!(
                "It is still banned: the hub rejects every agent until spec.banned of EdgeCluster {name} is false.\n"
            );
        }
        if spec.is_some_and(|spec| spec.source_ref.is_some()) {
            text += "If the hub has a kubeconfig for it, the kubeconfig must lead to the new cluster.\n";
        }
        text
    }
}

fn is_hub_finalizer(finalizer: &String) -> bool {
    finalizer == UNINSTALL_FINALIZER
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn replaced_member(spec: Value, status: Value) -> ReplacedMember {
        let object = json!({
            "apiVersion": "mesh.openkcm.io/v1alpha1", "kind": "EdgeCluster",
            "metadata": {
                "name": "edge-1", "uid": "u-1", "resourceVersion": "7", "generation": 3,
                "labels": {"team": "a"}, "annotations": {"mesh.openkcm.io/paused": "true", "mesh.openkcm.io/orphan": "true"},
                "finalizers": ["example.org/one"],
            },
            "spec": spec, "status": status,
        });
        ReplacedMember::new("edge-1", serde_json::from_value(object).unwrap())
    }

    #[test]
    fn replacement_keeps_user_fields_and_drops_status() {
        let spec = json!({"paused": true, "deletionPolicy": "Retain", "ofTheFuture": {"a": 1}});
        let member = replaced_member(spec.clone(), json!({"clusterUID": "c-1"}));
        let manifest: Value = serde_json::from_str(&member.manifest()).unwrap();
        let expected = json!({
            "apiVersion": "mesh.openkcm.io/v1alpha1", "kind": "EdgeCluster",
            "metadata": {
                "name": "edge-1",
                "labels": {"team": "a"}, "annotations": {"mesh.openkcm.io/paused": "true"},
            },
            "spec": spec,
        });
        assert_eq!(manifest, expected);
    }

    #[test]
    fn only_agentless_member_with_source_needs_no_bundle() {
        let source = json!({"sourceRef": {"kind": "Secret", "namespace": "n", "name": "edge-1"}});
        let enrolled = json!({"certificateExpiry": "2027-01-01T00:00:00Z"});
        assert!(!replaced_member(source.clone(), json!({})).needs_bundle());
        let not_seen = json!({"pendingCertificateExpiry": "2027-01-01T00:00:00Z"});
        assert!(replaced_member(source.clone(), not_seen).needs_bundle());
        assert!(replaced_member(source, enrolled.clone()).needs_bundle());
        assert!(replaced_member(json!({}), enrolled).needs_bundle());
        assert!(replaced_member(json!({}), json!({})).needs_bundle());
    }

    #[test]
    fn replace_explains_effects_on_old_cluster() {
        let status = json!({"clusterUID": "c-1", "certificateExpiry": "2027-01-01T00:00:00Z"});
        let effects =
            replaced_member(json!({"banned": true}), status).effects(Timestamp::UNIX_EPOCH);
        for words in ["UID c-1", "nothing is uninstalled", "void", "spec.banned"] {
            assert!(effects.contains(words), "{words}: {effects}");
        }
    }
}
