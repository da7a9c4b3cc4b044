//! Caches and writes the EdgeClusters on home.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_crds::edge_cluster::{EdgeCluster, EdgeClusterSpec, EdgeClusterStatus, SourceRef};
use krypton_runtime::call::{ApiError, call};
use krypton_runtime::clock::BootTime;
use krypton_runtime::work_queue::Outcome;
use krypton_types::conditions::{TARGET_RESOLVED, find};
use krypton_types::error_chain::chain;
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::runtime::watcher::Event;
use serde_json::Value;

use crate::leader::Leader;
use crate::leader::home_writer::{self, MIN_WRITE_INTERVAL, WriteOutcome};

/// The EdgeClusters by name, each with its source.
pub(super) type BoundSources = BTreeMap<String, Option<SourceRef>>;

/// The EdgeClusters that the watch delivered.
#[derive(Debug, Default)]
pub(super) struct EdgeClusters {
    pub(super) objects: BTreeMap<String, EdgeCluster>,
    listed: Option<BTreeSet<String>>,
    /// Whether the list is complete.
    pub(super) synced: bool,
    /// Members whose EdgeCluster was deleted or recreated. Earlier observations belong to another object.
    pub(super) recreated: BTreeSet<String>,
    /// Whether an EdgeCluster may have been deleted, by a user or with the CRD.
    pub(super) any_deleted: bool,
}

impl EdgeClusters {
    /// Returns each EdgeCluster with the source that it is bound to.
    pub(super) fn bound(&self) -> BoundSources {
        let objects = self.objects.iter();
        objects
            .map(|(name, object)| (name.clone(), object.spec.source_ref.clone()))
            .collect()
    }

    /// Starts over with a new list. The known objects may be incomplete or stale.
    pub(super) fn reset_list(&mut self) {
        (self.listed, self.synced) = (None, false);
    }

    /// Applies an event. Returns whether it requires more than a status write.
    pub(super) fn apply_event(
        &mut self,
        event: Event<EdgeCluster>,
        dirty: &mut BTreeSet<String>,
    ) -> bool {
        let name = |object: &EdgeCluster| object.metadata.name.clone().unwrap_or_default();
        match event {
            Event::Init => {
                self.listed = Some(BTreeSet::new());
                false
            }
            Event::InitApply(object) => {
                let name = name(&object);
                self.listed.get_or_insert_default().insert(name.clone());
                self.insert(name, object);
                false
            }
            Event::InitDone => {
                let listed = self.listed.take().unwrap_or_default();
                let unlisted = self
                    .objects
                    .extract_if(.., |name, _| !listed.contains(name));
                self.recreated.extend(unlisted.map(|(name, _)| name));
                // One that this hub created may be gone before any list or event had it.
                self.any_deleted = true;
                self.synced = true;
                dirty.extend(self.objects.keys().cloned());
                true
            }
            Event::Apply(object) => {
                let name = name(&object);
                // The hub's own status writes come back through the watch, and change nothing.
                let previous = self.objects.get(&name);
                if previous.is_none_or(|previous| previous.status != object.status) {
                    dirty.insert(name.clone());
                }
                self.insert(name, object)
            }
            Event::Delete(object) => {
                self.objects.remove(&name(&object));
                self.any_deleted = true;
                self.recreated.insert(name(&object));
                true
            }
        }
    }

    /// Stores a newer object. Returns whether anything besides its reported state changed.
    fn insert(&mut self, name: String, mut object: EdgeCluster) -> bool {
        // Managed fields are larger than the rest of the object, and unused here.
        object.metadata.managed_fields = None;
        let relevant_fields = |object: &EdgeCluster| {
            let status = object.status.as_ref();
            let uid = status.and_then(|status| status.cluster_uid.clone());
            let keys = status.and_then(|status| status.agent_keys.clone());
            // Objects that name the member show this condition.
            let resolved = status.and_then(|status| find(&status.conditions, TARGET_RESOLVED));
            let meta = &object.metadata;
            (
                object.spec.clone(),
                meta.uid.clone(),
                meta.annotations.clone(),
                (meta.deletion_timestamp.is_some(), meta.finalizers.clone()),
                (uid, resolved, keys),
                is_enrolled(object),
            )
        };
        let previous = self.objects.get(&name);
        if previous.is_some_and(|previous| previous.metadata.uid != object.metadata.uid) {
            self.recreated.insert(name.clone());
        }
        let changed = previous.map(relevant_fields) != Some(relevant_fields(&object));
        self.objects.insert(name, object);
        changed
    }
}

/// Returns whether an agent has enrolled for the member and connected.
pub(super) fn is_enrolled(object: &EdgeCluster) -> bool {
    certificate_expiry(object).is_some()
}

/// Returns the expiry of the agent's certificate, as of its last connection.
pub(super) fn certificate_expiry(object: &EdgeCluster) -> Option<Timestamp> {
    let end = object.status.as_ref()?.certificate_expiry.as_ref()?;
    Some(end.0)
}

/// Returns whether the member has an agent, or no source.
pub(super) fn is_joined(object: &EdgeCluster) -> bool {
    is_enrolled(object) || object.spec.source_ref.is_none()
}

/// A completed write.
pub(super) struct EdgeClusterWrite {
    /// The version before the write.
    previous_version: Option<String>,
    /// `None` if nothing was written.
    object: Option<EdgeCluster>,
    pub(super) result: WriteOutcome,
}

impl EdgeClusters {
    /// Stores the written object. If the watch has delivered an event since, that one is newer or the
    /// object is gone. Returns whether anything besides the reported state changed.
    pub(super) fn apply_write(&mut self, name: &str, write: EdgeClusterWrite) -> bool {
        let current = self.objects.get(name);
        let is_unchanged = current
            .is_some_and(|current| current.metadata.resource_version == write.previous_version);
        match write.object {
            Some(object) if is_unchanged => self.insert(name.to_owned(), object),
            _ => false,
        }
    }
}

impl EdgeClusterWrite {
    /// Returns the source of the EdgeCluster that this write created.
    pub(super) fn created_source(&self) -> Option<&SourceRef> {
        let created = self.object.as_ref()?;
        let is_new = self.previous_version.is_none();
        created.spec.source_ref.as_ref().filter(|_| is_new)
    }

    fn new(
        previous_version: Option<String>,
        (object, result): (Option<EdgeCluster>, WriteOutcome),
    ) -> Self {
        Self {
            previous_version,
            object,
            result,
        }
    }

    /// Returns when to write again. After a conflict, the watch is about to deliver the other write.
    pub(super) fn queue_outcome(&self, now: BootTime, jitter: f64) -> Outcome {
        match self.result {
            WriteOutcome::Ok | WriteOutcome::Failed => self.result.for_queue(now),
            WriteOutcome::Conflict => {
                Outcome::Again(now + MIN_WRITE_INTERVAL.mul_f64(0.5 + jitter))
            }
        }
    }
}

/// Creates the EdgeCluster of a new source. Sets `accepted` if it is given.
pub(super) async fn create(
    client: Client,
    leader: Leader,
    name: String,
    source: SourceRef,
    accepted: Option<bool>,
) -> EdgeClusterWrite {
    let object = EdgeCluster {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            ..ObjectMeta::default()
        },
        spec: EdgeClusterSpec {
            accepted,
            source_ref: Some(source),
            ..EdgeClusterSpec::default()
        },
        status: None,
    };
    let api: Api<EdgeCluster> = Api::all(client.clone());
    let created = call(
        format!("creating EdgeCluster {name}"),
        create_checked(&api, &leader, &object),
    )
    .await;
    let is_outdated = |error: &ApiError| {
        let status = error.status();
        status.is_some_and(|status| status.code == 404 || status.reason == CRD_OUTDATED)
    };
    if created.as_ref().is_err_and(is_outdated)
        && let Err(error) = krypton_runtime::crd::ensure(&client, EdgeCluster::crd()).await
    {
        tracing::warn!(error = %chain(&error), "failed to recreate the CRD of EdgeClusters; retrying");
    }
    EdgeClusterWrite::new(None, home_writer::outcome(created))
}

const CRD_OUTDATED: &str = "CrdOutdated";
const NOT_LEADING: &str = "NotLeading";

/// A CRD with an earlier schema drops `spec.accepted`, and the member would count as accepted. A dry run
/// detects this. The Lease may expire before it responds.
async fn create_checked(
    api: &Api<EdgeCluster>,
    leader: &Leader,
    object: &EdgeCluster,
) -> kube::Result<EdgeCluster> {
    if object.spec.accepted.is_some() {
        let dry_run = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        let stored = api.create(&dry_run, object).await?;
        if stored.spec.accepted != object.spec.accepted {
            let message = "the CRD of EdgeClusters drops spec.accepted; apply the CRD of this hub";
            let status = kube::core::Status::failure(message, CRD_OUTDATED);
            return Err(kube::Error::Api(Box::new(status)));
        }
    }
    if !leader.may_write(BootTime::now()) {
        let status = kube::core::Status::failure("the hub's Lease has expired", NOT_LEADING);
        return Err(kube::Error::Api(Box::new(status)));
    }
    let params = PostParams::default();
    api.create(&params, object).await
}

/// Adds or removes a finalizer by writing the complete list.
pub(super) async fn write_finalizers(
    client: Client,
    name: String,
    version: Option<String>,
    finalizers: Vec<String>,
) -> EdgeClusterWrite {
    let api: Api<EdgeCluster> = Api::all(client);
    let params = PatchParams::default();
    let patch = Patch::Merge(serde_json::json!({
        "metadata": { "resourceVersion": version, "finalizers": finalizers },
    }));
    let request = api.patch(&name, &params, &patch);
    let attempt = format!("writing the finalizers of EdgeCluster {name}");
    let response = home_writer::write(attempt, request).await;
    EdgeClusterWrite::new(version, response)
}

pub(super) async fn write_status(
    client: Client,
    name: String,
    version: Option<String>,
    status: Value,
) -> EdgeClusterWrite {
    let api: Api<EdgeCluster> = Api::all(client);
    let params = PatchParams::default();
    let patch = Patch::Merge(serde_json::json!({
        "metadata": { "resourceVersion": version },
        "status": status,
    }));
    let request = api.patch_status(&name, &params, &patch);
    let attempt = format!("writing the status of EdgeCluster {name}");
    let response = home_writer::write(attempt, request).await;
    EdgeClusterWrite::new(version, response)
}

/// Returns the merge patch that turns the recorded status into `next`.
pub(super) fn status_patch(
    recorded: Option<&EdgeClusterStatus>,
    next: &EdgeClusterStatus,
) -> Value {
    let [recorded, next] = [&recorded.cloned().unwrap_or_default(), next]
        .map(|status| serde_json::to_value(status).unwrap_or_default());
    merge(&recorded, next)
}

/// A merge patch removes only fields that are null.
fn merge(recorded: &Value, next: Value) -> Value {
    let (Value::Object(recorded), Value::Object(mut next)) = (recorded, next.clone()) else {
        return next;
    };
    for (field, value) in recorded {
        let merged = next.remove(field).map(|next| merge(value, next));
        next.insert(field.clone(), merged.unwrap_or_default());
    }
    Value::Object(next)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn conflicting_write_retries_soon_rejected_one_backs_off() {
        let soon = Outcome::Again(BootTime(MIN_WRITE_INTERVAL));
        for (result, expected) in [
            (WriteOutcome::Ok, soon),
            (WriteOutcome::Conflict, soon),
            (WriteOutcome::Failed, Outcome::Failed),
        ] {
            let write = EdgeClusterWrite::new(None, (None, result));
            let outcome = write.queue_outcome(BootTime::default(), 0.5);
            assert_eq!(outcome, expected, "{result:?}");
        }
    }

    #[test]
    fn status_patch_clears_absent_fields() {
        let recorded: EdgeClusterStatus = serde_json::from_value(json!({
            "leaseHolder": "agent-1",
            "kubernetesVersion": "v1",
            "trustedRoots": {"trusted": ["a"], "issuer": "a"},
            "tenantSummaries": {"tenants": [], "omitted": 1},
        }))
        .unwrap();
        let next: EdgeClusterStatus = serde_json::from_value(json!({
            "kubernetesVersion": "v2",
            "trustedRoots": {"issuer": "b"},
        }))
        .unwrap();
        let expected = json!({
            "leaseHolder": null,
            "kubernetesVersion": "v2",
            "trustedRoots": {"trusted": null, "issuer": "b"},
            "tenantSummaries": null,
        });
        assert_eq!(status_patch(Some(&recorded), &next), expected);
        assert_eq!(
            status_patch(None, &next),
            json!({"kubernetesVersion": "v2", "trustedRoots": {"issuer": "b"}})
        );
    }

    fn object(version: &str) -> EdgeCluster {
        let mut object = EdgeCluster::new("a", EdgeClusterSpec::default());
        object.metadata.resource_version = Some(version.to_owned());
        object
    }

    #[test]
    fn late_write_response_does_not_undo_watch_event() {
        let mut edge_clusters = EdgeClusters::default();
        let mut dirty = BTreeSet::new();
        edge_clusters.apply_event(Event::Apply(object("1")), &mut dirty);
        let response = || EdgeClusterWrite {
            previous_version: Some("1".to_owned()),
            object: Some(object("2")),
            result: WriteOutcome::Ok,
        };
        // In the interim, a user banned the member.
        let mut banned = object("3");
        banned.spec.banned = true;
        edge_clusters.apply_event(Event::Apply(banned), &mut dirty);
        edge_clusters.apply_write("a", response());
        assert!(edge_clusters.objects["a"].spec.banned);
        // A user deleted it.
        edge_clusters.apply_event(Event::Delete(object("3")), &mut dirty);
        edge_clusters.apply_write("a", response());
        assert!(edge_clusters.objects.is_empty());

        edge_clusters.apply_event(Event::Apply(object("1")), &mut dirty);
        edge_clusters.apply_write("a", response());
        assert_eq!(
            edge_clusters.objects["a"]
                .metadata
                .resource_version
                .as_deref(),
            Some("2")
        );
    }
}
