//! Removes objects that Helm forgets, in Helm's name and with Helm's rights. These are a failed attempt's objects
//! that no other revision declares, and the Go operator's objects in `default`.

use k8s_openapi::api::core::v1::Secret;
use krypton_helm::releases::labels::{
    OWNER_NAMESPACE_LABEL, OWNER_UID_LABEL, RUN_LABEL, ReleaseKey,
};
use krypton_helm::releases::revision::Revision;
use krypton_helm::releases::{self, ObjectId, Status};
use krypton_runtime::call::{ApiError, call};
use krypton_runtime::events::ObjectEvent;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, Preconditions};
use kube::core::ObjectMeta;
use kube::discovery::Scope;
use kube::{Client, ResourceExt};
use serde_json::{Value, json};

use super::objects::{annotation, belongs_to, discover_kind};
use super::{ActionError, ActionResult, ActionRunner, Job, JobResult, transient};
use crate::plan::revisions;

/// Kinds whose deletion can destroy data that no chart can recreate. Only a user may delete them.
const HOLDS_DATA: [&str; 4] = [
    "CustomResourceDefinition",
    "Namespace",
    "PersistentVolume",
    "PersistentVolumeClaim",
];
/// Maximum number of object names in an event.
const MAX_SHOWN: usize = 5;

impl ActionRunner {
    /// Removes an older revision's leftovers. Then changes the labels of its Secret, which records that it was swept.
    pub(super) async fn sweep(
        &self,
        job: &Job,
        (revision, source): (u32, LeftoverSource),
        result: &mut JobResult,
    ) -> ActionResult {
        // The release is as desired, even if the sweep fails.
        self.report(job, result).await?;
        let Some(newest) = &job.newest else {
            return Err(ActionError::Conflict);
        };
        let older = self.revision_secret(&job.release, revision).await?;
        let kept = self.revision_secret(&job.release, newest.revision).await?;
        let (Some(older), Some(kept)) = (older, kept) else {
            return self.relist_without(job, revision, result).await;
        };
        self.check_permit()?;
        self.remove_leftovers(job, (&older, &kept), source, false)
            .await?;
        let labels = match source {
            LeftoverSource::ByAttempt => json!({ RUN_LABEL: null }),
            LeftoverSource::InDefault => json!({
                OWNER_UID_LABEL: job.owner.uid(),
                OWNER_NAMESPACE_LABEL: job.owner.namespace(),
            }),
        };
        self.label_revision(job, &older, labels, "marking a revision as handled")
            .await?;
        self.relist(job, result).await
    }

    /// Sets these labels on the Secret of a revision.
    pub(super) async fn label_revision(
        &self,
        job: &Job,
        secret: &Secret,
        labels: Value,
        attempt: &'static str,
    ) -> ActionResult {
        self.check_permit()?;
        let patch = Patch::Merge(json!({ "metadata": {
            "resourceVersion": secret.metadata.resource_version,
            "labels": labels,
        }}));
        let params = PatchParams::default();
        let name = secret.name_any();
        let client = self.member.helm_client.clone();
        let api: Api<Secret> = Api::namespaced(client, &job.release.namespace);
        let marking = api.patch_metadata(&name, &params, &patch);
        call(attempt, marking).await?;
        Ok(())
    }

    /// Sweeps before an uninstallation, because Helm removes only the objects that its newest revision declares.
    pub(super) async fn sweep_before_uninstall(&self, job: &Job) -> ActionResult {
        let Some(newest) = &job.newest else {
            return Ok(());
        };
        let may_have_leftovers = |revision: &&Revision| match revision.status {
            _ if revision.revision == newest.revision => false,
            Status::Failed => revision.run.is_some(),
            Status::Deployed => newest.status != Status::Deployed,
            _ => false,
        };
        let all: Vec<&Revision> = job.revisions.iter().collect();
        let adopted = revisions::adopted(&all).into_iter();
        let older = all.iter().copied().filter(may_have_leftovers);
        let older: Vec<(u32, LeftoverSource)> = older
            .map(|revision| (revision.revision, LeftoverSource::ByAttempt))
            .chain(adopted.map(|revision| (revision, LeftoverSource::InDefault)))
            .collect();
        if older.is_empty() {
            return Ok(());
        }
        let Some(kept) = self.revision_secret(&job.release, newest.revision).await? else {
            return Err(ActionError::Conflict);
        };
        for (revision, source) in older {
            if let Some(secret) = self.revision_secret(&job.release, revision).await? {
                self.remove_leftovers(job, (&secret, &kept), source, true)
                    .await?;
            }
        }
        Ok(())
    }

    /// Removes the leftovers. With `best_effort`, a transient failure to remove one object does not stop the others.
    pub(super) async fn remove_leftovers(
        &self,
        job: &Job,
        (older, kept): (&Secret, &Secret),
        source: LeftoverSource,
        best_effort: bool,
    ) -> ActionResult {
        // A revision that cannot be decoded lists no objects. Helm skips it, too.
        let (Ok(older), Ok(kept)) = (releases::objects(older), releases::objects(kept)) else {
            return Ok(());
        };
        let client = &self.member.helm_client;
        let namespace = &job.release.namespace;
        let objects = match source {
            LeftoverSource::ByAttempt => releases::leftovers(&older, &kept, namespace),
            LeftoverSource::InDefault => releases::leftovers_in_default(&older, &kept, namespace),
        };
        let Some(objects) = objects else {
            let message = format!(
                "kept the leftovers of an earlier revision: {} documents of the newest revision are unreadable",
                kept.unreadable
            );
            let event = ObjectEvent::warning("LeftoversStay", message);
            self.emit_event(&job.owner, event);
            return Ok(());
        };
        let (mut removed, mut stays) = (Vec::new(), Vec::new());
        for object in objects {
            let shown = format!("{} {}", object.kind, object.name);
            if source == LeftoverSource::ByAttempt && HOLDS_DATA.contains(&object.kind.as_str()) {
                stays.push(shown);
                continue;
            }
            // Another process may act by now, and may have created the object.
            self.check_permit()?;
            let elsewhere = releases::declares_anywhere(&kept, &object);
            match remove(client, &job.release, &object, source, elsewhere).await {
                Ok(RemovalOutcome::Removed) => removed.push(shown),
                Ok(RemovalOutcome::Stays) => stays.push(shown),
                Ok(RemovalOutcome::NotThere) => {}
                Err(ActionError::Transient(problem)) if best_effort => {
                    tracing::warn!(object = %shown, %problem, "failed to remove leftover object");
                    stays.push(shown);
                }
                Err(error) => return Err(error),
            }
        }
        let [removed_text, stays_text] = source.description();
        let events = [
            (false, "LeftoversRemoved", removed_text, removed),
            (true, "LeftoversStay", stays_text, stays),
        ];
        for (warning, reason, text, names) in events {
            if let Some(message) = object_list_message(text, &names) {
                let event = ObjectEvent {
                    warning,
                    reason,
                    message,
                };
                self.emit_event(&job.owner, event);
            }
        }
        Ok(())
    }
}

/// The source of the leftovers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeftoverSource {
    /// Created by a failed Krypton attempt, and declared by no other revision.
    ByAttempt,
    /// Created in `default` by the Go operator. By now, a Krypton run has created all of them in the workspace.
    InDefault,
}

impl LeftoverSource {
    /// Returns the event texts for removed and for remaining objects.
    fn description(self) -> [&'static str; 2] {
        match self {
            Self::ByAttempt => [
                "removed objects of a failed attempt",
                "left over from a failed attempt; delete these objects yourself if you don't need them",
            ],
            Self::InDefault => [
                "removed objects of krypton-operator from namespace default",
                "krypton-operator created these objects in namespace default; move or delete them yourself",
            ],
        }
    }
}

fn object_list_message(text: &str, names: &[String]) -> Option<String> {
    let (shown, rest) = names.split_at(names.len().min(MAX_SHOWN));
    let shown = shown.join(", ");
    match rest.len() {
        _ if names.is_empty() => None,
        0 => Some(format!("{text}: {shown}")),
        more => Some(format!("{text}: {shown} and {more} more")),
    }
}

/// Result of a removal.
enum RemovalOutcome {
    Removed,
    /// The object does not exist, or does not belong to this release.
    NotThere,
    /// The object must be kept, or Krypton has no right to it.
    Stays,
}

/// Removes the object if it exists, belongs to this release and need not be kept. `elsewhere` means that the kept
/// revision declares an object of this name in another namespace. For a cluster-scoped kind, that is the same object.
async fn remove(
    client: &Client,
    release: &ReleaseKey,
    object: &ObjectId,
    source: LeftoverSource,
    elsewhere: bool,
) -> ActionResult<RemovalOutcome> {
    // Without the kind, the cluster has no objects of it.
    let Some((resource, scope)) = discover_kind(client, object).await? else {
        return Ok(RemovalOutcome::NotThere);
    };
    let api: Api<DynamicObject> = match scope {
        Scope::Namespaced => {
            let namespace = object.namespace.as_deref().unwrap_or(&release.namespace);
            Api::namespaced_with(client.clone(), namespace, &resource)
        }
        // A cluster-scoped object has no namespace, so it is already in the right place.
        Scope::Cluster if elsewhere || source == LeftoverSource::InDefault => {
            return Ok(RemovalOutcome::NotThere);
        }
        Scope::Cluster => Api::all_with(client.clone(), &resource),
    };
    let reading = api.get_metadata_opt(&object.name);
    let existing = match call("reading an object", reading).await {
        Ok(Some(existing)) => existing,
        Ok(None) => return Ok(RemovalOutcome::NotThere),
        Err(error) => return stays_if_forbidden(&error),
    };
    let holds_data = HOLDS_DATA.contains(&object.kind.as_str());
    let is_ours =
        belongs_to(&existing.metadata, release) && existing.metadata.deletion_timestamp.is_none();
    if source == LeftoverSource::InDefault
        && is_ours
        && (holds_data || !is_removable(&existing.metadata, release))
    {
        return Ok(RemovalOutcome::Stays);
    }
    if !is_removable(&existing.metadata, release) {
        return Ok(RemovalOutcome::NotThere);
    }
    let params = DeleteParams {
        preconditions: Some(Preconditions {
            uid: existing.metadata.uid.clone(),
            resource_version: match source {
                LeftoverSource::ByAttempt => None,
                // Another release may have adopted the object since the read.
                LeftoverSource::InDefault => existing.metadata.resource_version.clone(),
            },
        }),
        ..DeleteParams::background()
    };
    let removing = api.delete(&object.name, &params);
    let removed = call("removing an object", removing).await;
    let Err(error) = removed else {
        return Ok(RemovalOutcome::Removed);
    };
    match error.code() {
        Some(409) if source == LeftoverSource::InDefault => Err(ActionError::Conflict),
        Some(404 | 409) => Ok(RemovalOutcome::NotThere),
        _ => stays_if_forbidden(&error),
    }
}

fn stays_if_forbidden(error: &ApiError) -> ActionResult<RemovalOutcome> {
    match error.code() {
        Some(403) => Ok(RemovalOutcome::Stays),
        _ => Err(transient(error)),
    }
}

/// Whether Helm's marks assign the object to the release, and the chart does not keep it.
fn is_removable(object: &ObjectMeta, release: &ReleaseKey) -> bool {
    belongs_to(object, release)
        && annotation(object, "helm.sh/resource-policy") != Some("keep")
        && object.deletion_timestamp.is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_marked_unkept_objects_may_be_removed() {
        let release = ReleaseKey::new("acme", "tenant-acme-edge-1");
        let marked = |name: &str, namespace: &str, policy: &str| {
            let marks = [
                ("meta.helm.sh/release-name", name),
                ("meta.helm.sh/release-namespace", namespace),
                ("helm.sh/resource-policy", policy),
            ];
            let marks = marks.map(|(key, value)| (key.to_owned(), value.to_owned()));
            let managed = ("app.kubernetes.io/managed-by".to_owned(), "Helm".to_owned());
            ObjectMeta {
                annotations: Some(marks.into()),
                labels: Some([managed].into()),
                ..ObjectMeta::default()
            }
        };
        let removable = marked(&release.name, "acme", "");
        assert!(is_removable(&removable, &release));
        for not_removable in [
            marked("other", "acme", ""),
            marked(&release.name, "other", ""),
            marked(&release.name, "acme", "keep"),
            ObjectMeta {
                labels: None,
                ..removable.clone()
            },
            ObjectMeta {
                annotations: None,
                ..removable
            },
        ] {
            assert!(!is_removable(&not_removable, &release));
        }
    }

    #[test]
    fn event_names_few_objects_and_counts_rest() {
        let names: Vec<String> = (0..7).map(|number| format!("ConfigMap {number}")).collect();
        assert_eq!(object_list_message("gone", &[]), None);
        let text = object_list_message("gone", &names).unwrap();
        assert!(text.ends_with("ConfigMap 4 and 2 more"), "{text}");
    }
}
