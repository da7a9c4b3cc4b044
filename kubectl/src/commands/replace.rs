//! `kubectl krypton join NAME --replace`: the EdgeCluster is deleted and made anew with the same spec, so
//! that the cluster and the certificate on record are void, and the rebuilt cluster can take the name.

use std::time::Duration;

use jiff::Timestamp;
use krypton_crds::edge_cluster::{DeletionPolicy, EdgeCluster};
use krypton_types::names;
use kube::api::{
    Api, DeleteParams, DynamicObject, ObjectMeta, Patch, PatchParams, PostParams, Preconditions,
};
use kube::core::ApiResource;
use kube::{Client, Error as KubeError, ResourceExt as _};
use serde::Deserialize as _;
use serde_json::{Value, json};

const DEADLINE: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Somebody who makes it anew before us, three times in a row, is not waited for.
const TRIES: usize = 3;

#[derive(Debug, thiserror::Error)]
pub enum ReplaceError {
    #[error(
        "{attempt} EdgeCluster {member} failed; --replace needs the verbs get, create, patch and delete on edgeclusters.mesh.openkcm.io"
    )]
    Call {
        attempt: &'static str,
        member: String,
        #[source]
        source: KubeError,
    },
    #[error("{attempt} EdgeCluster {member}: no answer within {} s; run it again", DEADLINE.as_secs())]
    Deadline {
        attempt: &'static str,
        member: String,
    },
    #[error(
        "there is no EdgeCluster {0} to be replaced; leave --replace out to let a new cluster join under that name"
    )]
    None(String),
    #[error("EdgeCluster {0} has changed while it was looked at; look at it and run this again")]
    Changed(String),
    #[error(
        "EdgeCluster {member} is being deleted and waits for its finalizers {finalizers:?}; find out who is to take them off ({} is the hub's, which takes it off when it runs), then make it anew with 'kubectl create -f -' out of this: {manifest}",
        names::UNINSTALL_FINALIZER
    )]
    Held {
        member: String,
        finalizers: Vec<String>,
        manifest: String,
    },
    #[error(
        "EdgeCluster {member} was deleted and is not there again; make it with 'kubectl create -f -' out of this: {manifest}"
    )]
    NotMade {
        member: String,
        manifest: String,
        #[source]
        source: KubeError,
    },
}

/// An EdgeCluster that is to be replaced, as it was read.
#[derive(Debug)]
pub(crate) struct Old {
    name: String,
    /// Untyped, so that fields of a later version stay.
    object: DynamicObject,
    typed: Option<EdgeCluster>,
}

impl Old {
    pub(crate) async fn read(client: &Client, name: &str) -> Result<Self, ReplaceError> {
        let api = api(client);
        let object = in_time("reading", name, api.get_opt(name)).await?;
        let object = object.map_err(|source| failed("reading", name, source))?;
        let object = object.ok_or_else(|| ReplaceError::None(name.to_owned()))?;
        let whole = serde_json::to_value(&object).unwrap_or_default();
        Ok(Self {
            name: name.to_owned(),
            object,
            typed: EdgeCluster::deserialize(whole).ok(),
        })
    }

    /// Whether an agent is to enrol; else the hub finds the new cluster by its source.
    pub(crate) fn needs_bundle(&self) -> bool {
        self.typed
            .as_ref()
            .is_none_or(|object| self.has_enrolled() || object.spec.source_ref.is_none())
    }

    /// Whether an agent has a certificate for it, be it one that has not connected with it yet.
    fn has_enrolled(&self) -> bool {
        let status = self.typed.as_ref().and_then(|known| known.status.as_ref());
        status.is_some_and(|status| {
            status.certificate_expiry.is_some() || status.enrolled_until.is_some()
        })
    }

    /// Deletes it and makes it anew.
    pub(crate) async fn replace(&self, client: &Client) -> Result<(), ReplaceError> {
        self.orphan(client).await?;
        self.delete(client).await?;
        self.gone(client).await?;
        self.make(client).await
    }

    /// The cluster is another, not gone: whatever its `deletionPolicy`, nothing is uninstalled for this.
    async fn orphan(&self, client: &Client) -> Result<(), ReplaceError> {
        let spec = self.typed.as_ref().map(|object| &object.spec);
        let uninstalls = spec.is_none_or(|spec| spec.deletion_policy != DeletionPolicy::Retain);
        if !uninstalls && !self.object.finalizers().iter().any(is_ours) {
            return Ok(());
        }
        let patch = Patch::Merge(json!({
            "metadata": {
                "uid": self.object.metadata.uid,
                "annotations": { names::ORPHAN_ANNOTATION: "true" },
            },
        }));
        let (api, params) = (api(client), PatchParams::default());
        let patched = in_time(
            "annotating",
            &self.name,
            api.patch(&self.name, &params, &patch),
        );
        match patched.await? {
            Ok(_) => Ok(()),
            Err(KubeError::Api(status)) if matches!(status.code, 404 | 409) => {
                Err(ReplaceError::Changed(self.name.clone()))
            }
            Err(source) => Err(failed("annotating", &self.name, source)),
        }
    }

    async fn delete(&self, client: &Client) -> Result<(), ReplaceError> {
        let api = api(client);
        // What was not looked at is not deleted.
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: self.object.metadata.uid.clone(),
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        match in_time("deleting", &self.name, api.delete(&self.name, &params)).await? {
            Ok(_) => Ok(()),
            Err(KubeError::Api(status)) if matches!(status.code, 404 | 409) => {
                Err(ReplaceError::Changed(self.name.clone()))
            }
            Err(source) => Err(failed("deleting", &self.name, source)),
        }
    }

    async fn gone(&self, client: &Client) -> Result<(), ReplaceError> {
        let (api, uid) = (api(client), self.object.metadata.uid.as_ref());
        let mut ours = Vec::new();
        let waiting = async {
            loop {
                let found = api.get_metadata_opt(&self.name).await?;
                let Some(found) = found.filter(|found| found.metadata.uid.as_ref() == uid) else {
                    return Ok(());
                };
                // The hub takes its own off.
                let held = found.metadata.finalizers.unwrap_or_default();
                if held.iter().any(|finalizer| !is_ours(finalizer)) {
                    return Err(Waited::Held(held));
                }
                ours = held;
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        let waited = match tokio::time::timeout(DEADLINE, waiting).await {
            Err(_) if !ours.is_empty() => Err(Waited::Held(ours)),
            waited => waited.map_err(|_| ReplaceError::Deadline {
                attempt: "deleting",
                member: self.name.clone(),
            })?,
        };
        match waited {
            Ok(()) => Ok(()),
            Err(Waited::Held(finalizers)) => Err(ReplaceError::Held {
                member: self.name.clone(),
                finalizers,
                manifest: self.manifest(),
            }),
            Err(Waited::Failed(source)) => Err(failed("reading", &self.name, source)),
        }
    }

    async fn make(&self, client: &Client) -> Result<(), ReplaceError> {
        let (api, object) = (api(client), self.anew());
        let mut last = None;
        for _ in 0..TRIES {
            let params = PostParams::default();
            let made = in_time("making", &self.name, api.create(&params, &object)).await;
            match made.map_err(|late| self.not_made_in_time(late))? {
                Ok(_) => return Ok(()),
                // A hub that had not seen yet that it was deleted by a person, or an agent that
                // enrolled: of this name and of no other cluster, but with another spec.
                Err(KubeError::Api(status)) if status.code == 409 => {}
                Err(source) => return Err(self.not_made(source)),
            }
            let patch = Patch::Merge(json!({
                "metadata": {
                    "labels": object.metadata.labels,
                    "annotations": object.metadata.annotations,
                },
                "spec": object.data.get("spec"),
            }));
            let params = PatchParams::default();
            let patched = in_time("making", &self.name, api.patch(&self.name, &params, &patch));
            match patched.await.map_err(|late| self.not_made_in_time(late))? {
                Ok(_) => return Ok(()),
                Err(error @ KubeError::Api(_)) => last = Some(error),
                Err(source) => return Err(self.not_made(source)),
            }
        }
        match last {
            Some(source) => Err(self.not_made(source)),
            None => Err(ReplaceError::Changed(self.name.clone())),
        }
    }

    /// The same without what the apiserver and the hub have written.
    fn anew(&self) -> DynamicObject {
        let spec = self.object.data.get("spec").cloned();
        let mut annotations = self.object.metadata.annotations.clone();
        // Of an earlier try to replace it: it was for the one that goes.
        if let Some(annotations) = &mut annotations {
            annotations.remove(names::ORPHAN_ANNOTATION);
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

    fn not_made(&self, source: KubeError) -> ReplaceError {
        ReplaceError::NotMade {
            member: self.name.clone(),
            manifest: self.manifest(),
            source,
        }
    }

    fn not_made_in_time(&self, late: ReplaceError) -> ReplaceError {
        let source = KubeError::Service(late.to_string().into());
        self.not_made(source)
    }

    fn manifest(&self) -> String {
        let kind = ApiResource::erase::<EdgeCluster>(&());
        let mut manifest = serde_json::to_value(self.anew()).unwrap_or_default();
        if let Some(fields) = manifest.as_object_mut() {
            fields.insert("apiVersion".to_owned(), Value::String(kind.api_version));
            fields.insert("kind".to_owned(), Value::String(kind.kind));
        }
        manifest.to_string()
    }

    /// What was done, and what that means for what was there.
    pub(crate) fn said(&self, now: Timestamp) -> String {
        let name = &self.name;
        let uid = self.object.uid().unwrap_or_default();
        let mut said = format!(
            "EdgeCluster {name} (UID {uid}) was deleted and made anew at {now} with the same spec, labels and annotations.\n\
             It is on record for no cluster now: the next one that answers under the name {name} is.\n"
        );
        let status = self.typed.as_ref().and_then(|known| known.status.as_ref());
        let former = status.and_then(|status| status.cluster_uid.as_deref());
        if let Some(former) = former {
            said.push_str(&format!(
                "The former cluster (UID {former}) has left the fleet. If it still runs, its releases and Tenants stay there as they are, and nothing is uninstalled.\n"
            ));
        }
        if self.has_enrolled() {
            said.push_str(
                "The certificate of its former agent is void. If that agent still runs, it goes on there with the last desired state it has: stop it.\n",
            );
        }
        let spec = self.typed.as_ref().map(|object| &object.spec);
        if spec.is_some_and(|spec| spec.banned) {
            said.push_str(&format!(
                "It is banned as before: nobody is let in until spec.banned of EdgeCluster {name} is false.\n"
            ));
        }
        if spec.is_some_and(|spec| spec.source_ref.is_some()) {
            said.push_str(
                "Where the hub has a kubeconfig for it, that must lead to the new cluster.\n",
            );
        }
        said
    }
}

enum Waited {
    Held(Vec<String>),
    Failed(KubeError),
}

impl From<KubeError> for Waited {
    fn from(error: KubeError) -> Self {
        Self::Failed(error)
    }
}

fn is_ours(finalizer: impl AsRef<str>) -> bool {
    finalizer.as_ref() == names::UNINSTALL_FINALIZER
}

fn api(client: &Client) -> Api<DynamicObject> {
    Api::all_with(client.clone(), &ApiResource::erase::<EdgeCluster>(&()))
}

fn failed(attempt: &'static str, member: &str, source: KubeError) -> ReplaceError {
    ReplaceError::Call {
        attempt,
        member: member.to_owned(),
        source,
    }
}

async fn in_time<T>(
    attempt: &'static str,
    member: &str,
    call: impl Future<Output = T>,
) -> Result<T, ReplaceError> {
    let late = |_| ReplaceError::Deadline {
        attempt,
        member: member.to_owned(),
    };
    tokio::time::timeout(DEADLINE, call).await.map_err(late)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn old(spec: Value, status: Value) -> Old {
        let whole = json!({
            "apiVersion": "mesh.openkcm.io/v1alpha1", "kind": "EdgeCluster",
            "metadata": {
                "name": "edge-1", "uid": "u-1", "resourceVersion": "7", "generation": 3,
                "labels": {"team": "a"}, "annotations": {"mesh.openkcm.io/paused": "true", "mesh.openkcm.io/orphan": "true"},
                "finalizers": ["example.org/one"],
            },
            "spec": spec, "status": status,
        });
        Old {
            name: "edge-1".to_owned(),
            object: serde_json::from_value(whole.clone()).unwrap(),
            typed: serde_json::from_value(whole).ok(),
        }
    }

    #[test]
    fn replacement_keeps_user_fields_and_drops_status() {
        let spec = json!({"paused": true, "deletionPolicy": "Retain", "ofTheFuture": {"a": 1}});
        let old = old(spec.clone(), json!({"clusterUID": "c-1"}));
        let manifest: Value = serde_json::from_str(&old.manifest()).unwrap();
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
        assert!(!old(source.clone(), json!({})).needs_bundle());
        let not_seen = json!({"enrolledUntil": "2027-01-01T00:00:00Z"});
        assert!(old(source.clone(), not_seen).needs_bundle());
        assert!(old(source, enrolled.clone()).needs_bundle());
        assert!(old(json!({}), enrolled).needs_bundle());
        assert!(old(json!({}), json!({})).needs_bundle());
    }

    #[test]
    fn replace_explains_effects_on_former_cluster() {
        let status = json!({"clusterUID": "c-1", "certificateExpiry": "2027-01-01T00:00:00Z"});
        let said = old(json!({"banned": true}), status).said(Timestamp::UNIX_EPOCH);
        for words in ["UID c-1", "nothing is uninstalled", "void", "spec.banned"] {
            assert!(said.contains(words), "{words}: {said}");
        }
    }
}
