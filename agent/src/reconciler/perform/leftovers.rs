//! What a failed attempt has made and no other revision declares: helm forgets such objects, so they are
//! removed here, in helm's name and with helm's rights.

use k8s_openapi::api::core::v1::Secret;
use krypton_common::error_chain::chain;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, Preconditions};
use kube::core::{ApiResource, GroupVersionKind, ObjectMeta, PartialObjectMeta};
use kube::discovery::{ApiCapabilities, Scope, pinned_kind};
use kube::{Client, ResourceExt};
use serde_json::json;

use super::{Done, Fault, Job, Performer, in_time};
use crate::effect;
use crate::index::{RUN_LABEL, ReleaseKey, Revision};
use crate::release::{self, Declared, Status};
use crate::status::Told;

/// Kinds with which goes what no chart can make again: that is for a person to decide.
const HOLDS_DATA: [&str; 4] = [
    "CustomResourceDefinition",
    "Namespace",
    "PersistentVolume",
    "PersistentVolumeClaim",
];
/// Names in an event.
const SHOWN: usize = 5;

impl Performer {
    /// Removes what the failed revision left, and takes its mark off: it has been seen to.
    pub(super) async fn sweep(
        &self,
        job: &Job,
        revision: u32,
        done: &mut Done,
    ) -> Result<(), Fault> {
        // The release is as desired, whatever becomes of this.
        self.say(job, done).await?;
        let Some(newest) = &job.newest else {
            return Err(Fault::Stale);
        };
        let failed = self.revision_secret(&job.release, revision).await?;
        let kept = self.revision_secret(&job.release, newest.revision).await?;
        let (Some(failed), Some(kept)) = (failed, kept) else {
            return self.relist(job, done).await;
        };
        self.still_permitted()?;
        let client = &self.member.helm_client;
        self.remove_left_over(client, job, (&failed, &kept), false)
            .await?;
        self.still_permitted()?;
        let patch = Patch::Merge(json!({ "metadata": {
            "resourceVersion": failed.metadata.resource_version,
            "labels": { RUN_LABEL: null },
        }}));
        let params = PatchParams::default();
        let name = failed.name_any();
        let api: Api<Secret> = Api::namespaced(client.clone(), &job.release.namespace);
        let call = effect!(
            "release.mark-seen-to",
            api.patch_metadata(&name, &params, &patch)
        );
        in_time("marking a failed revision as seen to", call).await?;
        self.relist(job, done).await
    }

    /// Before a release goes: helm removes what its newest revision declares, and nothing else.
    pub(super) async fn sweep_before_uninstall(&self, job: &Job) -> Result<(), Fault> {
        let Some(newest) = &job.newest else {
            return Ok(());
        };
        let forgotten = |revision: &&Revision| match revision.status {
            _ if revision.revision == newest.revision => false,
            Status::Failed => revision.run.is_some(),
            Status::Deployed => newest.status != Status::Deployed,
            _ => false,
        };
        let former: Vec<&Revision> = job.revisions.iter().filter(forgotten).collect();
        if former.is_empty() {
            return Ok(());
        }
        let Some(kept) = self.revision_secret(&job.release, newest.revision).await? else {
            return Err(Fault::Stale);
        };
        let client = &self.member.helm_client;
        for revision in former {
            if let Some(secret) = self
                .revision_secret(&job.release, revision.revision)
                .await?
            {
                self.remove_left_over(client, job, (&secret, &kept), true)
                    .await?;
            }
        }
        Ok(())
    }

    /// `anyhow`: what refuses to go keeps nothing else from going.
    async fn remove_left_over(
        &self,
        client: &Client,
        job: &Job,
        (former, kept): (&Secret, &Secret),
        anyhow: bool,
    ) -> Result<(), Fault> {
        // What cannot be read names nothing; helm passes over it as well.
        let (Ok(former), Ok(kept)) = (release::objects(former), release::objects(kept)) else {
            return Ok(());
        };
        let namespace = &job.release.namespace;
        let (mut removed, mut stays) = (Vec::new(), Vec::new());
        for object in release::left_over(&former, &kept, namespace) {
            let shown = format!("{} {}", object.kind, object.name);
            if HOLDS_DATA.contains(&object.kind.as_str()) {
                stays.push(shown);
                continue;
            }
            // Another may act by now, and what is found may be what it has made.
            self.still_permitted()?;
            let elsewhere = release::declares_anywhere(&kept, &object);
            match remove(client, &job.release, &object, elsewhere).await {
                Ok(true) => removed.push(shown),
                Ok(false) => {}
                Err(Refused::Forbidden) => stays.push(shown),
                Err(Refused::Fault(Fault::Passing(problem))) if anyhow => {
                    tracing::warn!(subject = %job.key, object = %shown, %problem, "not removed");
                    stays.push(shown);
                }
                Err(Refused::Fault(fault)) => return Err(fault),
            }
        }
        let told = [
            (
                false,
                "LeftoversRemoved",
                "removed what a failed attempt left",
                removed,
            ),
            (
                true,
                "LeftoversStay",
                "of what a failed attempt left a person is to remove, if it is to go",
                stays,
            ),
        ];
        for (warning, reason, what, names) in told {
            if let Some(message) = listed(what, &names) {
                let told = Told {
                    warning,
                    reason,
                    message,
                };
                self.tell(&job.subject, told);
            }
        }
        Ok(())
    }
}

fn listed(what: &str, names: &[String]) -> Option<String> {
    let shown: Vec<&str> = names.iter().take(SHOWN).map(String::as_str).collect();
    let more = names.len() - shown.len();
    let rest = if more > 0 {
        format!(" and {more} more")
    } else {
        String::new()
    };
    (!names.is_empty()).then(|| format!("{what}: {}{rest}", shown.join(", ")))
}

enum Refused {
    Forbidden,
    Fault(Fault),
}

impl From<Fault> for Refused {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

/// Removes the object if it is there, is this release's, and is not to be kept. Whether it was. One of its
/// name is declared `elsewhere`, in another namespace: it is the same where its kind has none.
async fn remove(
    client: &Client,
    of: &ReleaseKey,
    object: &Declared,
    elsewhere: bool,
) -> Result<bool, Refused> {
    let (group, version) = object
        .api_version
        .split_once('/')
        .unwrap_or(("", &object.api_version));
    let kind = GroupVersionKind::gvk(group, version, &object.kind);
    let known = tokio::time::timeout(super::DEADLINE, Box::pin(pinned_kind(client, &kind))).await;
    let (resource, about): (ApiResource, ApiCapabilities) = match known {
        Ok(Ok(known)) => known,
        // The kind is gone, and its objects with it.
        Ok(Err(kube::Error::Api(status))) if status.code == 404 => return Ok(false),
        Ok(Err(kube::Error::Discovery(_))) => return Ok(false),
        Ok(Err(error)) => return Err(Fault::Passing(chain(&error)).into()),
        Err(_) => return Err(Fault::Passing("asking for kinds: no answer".to_owned()).into()),
    };
    let api: Api<DynamicObject> = match about.scope {
        Scope::Namespaced => {
            let namespace = object.namespace.as_deref().unwrap_or(&of.namespace);
            Api::namespaced_with(client.clone(), namespace, &resource)
        }
        Scope::Cluster if elsewhere => return Ok(false),
        Scope::Cluster => Api::all_with(client.clone(), &resource),
    };
    let call = api.get_metadata_opt(&object.name);
    let found: Option<PartialObjectMeta<DynamicObject>> =
        match tokio::time::timeout(super::DEADLINE, Box::pin(call)).await {
            Ok(Err(kube::Error::Api(status))) if status.code == 403 => {
                return Err(Refused::Forbidden);
            }
            Ok(Ok(found)) => found,
            Ok(Err(error)) => return Err(Fault::Passing(chain(&error)).into()),
            Err(_) => return Err(Fault::Passing("reading an object: no answer".to_owned()).into()),
        };
    let Some(found) = found else {
        return Ok(false);
    };
    if !is_of(&found.metadata, of) {
        return Ok(false);
    }
    let params = DeleteParams {
        preconditions: Some(Preconditions {
            uid: found.metadata.uid.clone(),
            resource_version: None,
        }),
        ..DeleteParams::background()
    };
    let call = effect!("leftover.remove", api.delete(&object.name, &params));
    match tokio::time::timeout(super::DEADLINE, Box::pin(call)).await {
        Ok(Ok(_)) => Ok(true),
        Ok(Err(kube::Error::Api(status))) if status.code == 403 => Err(Refused::Forbidden),
        Ok(Err(kube::Error::Api(status))) if [404, 409].contains(&status.code) => Ok(false),
        Ok(Err(error)) => Err(Fault::Passing(chain(&error)).into()),
        Err(_) => Err(Fault::Passing("removing an object: no answer".to_owned()).into()),
    }
}

/// By helm's own marks, and not one that the chart keeps.
fn is_of(object: &ObjectMeta, release: &ReleaseKey) -> bool {
    let policy = object.annotations.as_ref();
    let policy = policy.and_then(|annotations| annotations.get("helm.sh/resource-policy"));
    bears_marks(object, release)
        && policy.map(String::as_str) != Some("keep")
        && object.deletion_timestamp.is_none()
}

/// By helm's own marks.
pub(super) fn bears_marks(object: &ObjectMeta, release: &ReleaseKey) -> bool {
    let text = |map: &Option<std::collections::BTreeMap<String, String>>, key: &str| {
        map.as_ref().and_then(|map| map.get(key)).cloned()
    };
    let annotation = |key: &str| text(&object.annotations, key);
    text(&object.labels, "app.kubernetes.io/managed-by").as_deref() == Some("Helm")
        && annotation("meta.helm.sh/release-name").as_ref() == Some(&release.name)
        && annotation("meta.helm.sh/release-namespace").as_ref() == Some(&release.namespace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_bears_the_releases_own_marks_and_is_not_kept_may_go() {
        let release = ReleaseKey {
            namespace: "acme".to_owned(),
            name: "tenant-acme-edge-1".to_owned(),
        };
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
        let ours = marked(&release.name, "acme", "");
        assert!(is_of(&ours, &release));
        for theirs in [
            marked("other", "acme", ""),
            marked(&release.name, "other", ""),
            marked(&release.name, "acme", "keep"),
            ObjectMeta {
                labels: None,
                ..ours.clone()
            },
            ObjectMeta {
                annotations: None,
                ..ours
            },
        ] {
            assert!(!is_of(&theirs, &release));
        }
    }

    #[test]
    fn an_event_names_a_few_and_counts_the_rest() {
        let names: Vec<String> = (0..7).map(|number| format!("ConfigMap {number}")).collect();
        assert_eq!(listed("gone", &[]), None);
        let text = listed("gone", &names).unwrap();
        assert!(text.ends_with("ConfigMap 4 and 2 more"), "{text}");
    }
}
