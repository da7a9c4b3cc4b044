//! Invariants of the revisions and objects of a release during upgrades, repairs and drift corrections.

use k8s_openapi::api::core::v1::Secret;
use krypton_helm::releases::{Declarations, ObjectId, objects};
use serde_json::Value;

use super::view::{is_helm, is_product, revision_number};
use super::{Change, CheckResult, Oracle, Update, View, ensure, invariant};
use crate::faults::{REBUILD_WRITER, RESTORE_WRITER};
use crate::object::{annotation, text};
use crate::plan::Settings;

invariant! {
    /// If Helm reports an upgrade as failed, the previously deployed revision stays deployed.
    FailedUpgradeKeepsDeployed, "failed-upgrade-keeps-deployed",
    fn check_update(&mut self, view: &View, (cluster, change, before, after): Update<'_>) -> CheckResult {
        let status = |secret: &Value| text(secret, "/metadata/labels/status").to_owned();
        if !is_helm(&change.by) || status(before) != "pending-upgrade" || status(after) != "failed" {
            return Ok(());
        }
        let release = text(after, "/metadata/labels/name");
        let number = revision_number(after).unwrap_or_default();
        let revisions = view.revisions(cluster, &change.key.namespace, release);
        let earlier_statuses: Vec<String> = revisions
            .iter()
            .filter(|(version, _)| *version < number)
            .map(|(_, secret)| status(secret))
            .collect();
        // A pruned history has lost the revision only if it was not deployed.
        let is_lost = earlier_statuses.iter().any(|status| status == "superseded")
            && !earlier_statuses.iter().any(|status| status == "deployed" || status == "failed");
        ensure(!is_lost, || format!("{release} has no deployed revision after its failure"))
    }
}

invariant! {
    /// A new revision of a release has a higher number than all earlier ones.
    RevisionsRise, "revisions-rise",
    fn check_change(&mut self, view: &View, cluster: &str, change: &Change) -> CheckResult {
        let secret = change.after.as_deref().filter(|_| change.before.is_none());
        let secret = secret.filter(|secret| {
            is_helm(&change.by) && text(secret, "/type") == "helm.sh/release.v1"
        });
        let Some((secret, number)) = secret.and_then(|secret| Some((secret, revision_number(secret)?))) else {
            return Ok(());
        };
        let release = text(secret, "/metadata/labels/name");
        let revisions = view.revisions(cluster, &change.key.namespace, release);
        let newest = revisions.last().map(|(version, _)| *version);
        ensure(newest == Some(number), || {
            format!("revision {number} of {release} follows {newest:?}")
        })
    }
}

invariant! {
    /// Krypton deletes no readable revision that a dead Helm process left locked. Only Helm ends such a revision.
    LockedRevisionsStay, "locked-revisions-stay",
    fn check_change(&mut self, _: &View, _: &str, change: &Change) -> CheckResult {
        let (Some(before), None) = (&change.before, &change.after) else {
            return Ok(());
        };
        let status = text(before, "/metadata/labels/status");
        let is_locked = status.starts_with("pending-") || status == "uninstalling";
        let is_deletion = is_product(&change.by) && !is_helm(&change.by) && is_locked;
        let is_allowed = !is_deletion || declared_objects(before).is_none();
        ensure(is_allowed, || format!("{} deletes {}", change.by, change.key.name))
    }
}

invariant! {
    /// Krypton and Helm delete no object that the newest revision of a wanted release contains.
    ObjectsOfReleaseStay, "objects-of-release-stay",
    fn check_change(&mut self, view: &View, cluster: &str, change: &Change) -> CheckResult {
        let (Some(before), None) = (&change.before, &change.after) else {
            return Ok(());
        };
        let Some(release) = annotation(before, "meta.helm.sh/release-name") else {
            return Ok(());
        };
        let member = Settings::member_for(cluster);
        let tenant = release
            .strip_prefix("tenant-")
            .and_then(|rest| rest.strip_suffix(member)?.strip_suffix('-'));
        let is_wanted = match (tenant, release.strip_prefix("ced-")) {
            (Some(tenant), _) => view.wants_tenant(cluster, tenant),
            // A deployment may have moved.
            _ => false,
        };
        if !is_product(&change.by) || !is_wanted || view.is_decommissioning(member) {
            return Ok(());
        }
        let namespace = annotation(before, "meta.helm.sh/release-namespace").unwrap_or_default();
        let revisions = view.revisions(cluster, namespace, release);
        let Some((_, newest)) = revisions.last() else {
            return Ok(());
        };
        ensure(!declares(newest, before), || {
            format!("{} deletes {} of {release}", change.by, change.key.name)
        })
    }
}

/// The objects of a revision, if its Secret can be decoded.
fn declared_objects(revision: &Value) -> Option<Declarations> {
    let secret: Secret = serde_json::from_value(revision.clone()).ok()?;
    objects(&secret).ok()
}

/// Whether the manifest of a revision contains the object.
fn declares(revision: &Value, object: &Value) -> bool {
    let (Some(declarations), Some(object)) =
        (declared_objects(revision), ObjectId::from_object(object))
    else {
        return false;
    };
    declarations.objects.iter().any(|declared| {
        let has_namespace = declared.namespace.is_none() || declared.namespace == object.namespace;
        declared.kind == object.kind && declared.name == object.name && has_namespace
    })
}

invariant! {
    /// Krypton and Helm never change the UID of an object in one write.
    UidNeverChanges, "uid-never-changes",
    fn check_update(&mut self, _: &View, (cluster, change, before, after): Update<'_>) -> CheckResult {
        let is_same_uid = text(before, "/metadata/uid") == text(after, "/metadata/uid");
        ensure(is_same_uid || [RESTORE_WRITER, REBUILD_WRITER].contains(&change.by.as_str()), || {
            format!("{} on {cluster} gets another UID", change.key.name)
        })
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use serde_json::json;

    use super::super::story::{History, RELEASE, config_map, deletion_patch, revision, tenant};
    use super::*;

    const HELM: &str = "helm:agent-edge-1";

    /// A revision that declares the ConfigMap `named`.
    fn declaring(version: u32, named: &str) -> Value {
        let manifest = format!("apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {named}\n");
        let payload = json!({
            "name": RELEASE,
            "namespace": "t0",
            "version": version,
            "info": {"status": "deployed"},
            "chart": {"metadata": {"name": "c", "version": "1.0.0"}},
            "manifest": manifest,
        });
        let packed = krypton_helm::releases::pack(payload.to_string().as_bytes()).unwrap();
        // The API encodes the data of a Secret.
        let data = STANDARD.encode(packed);
        let mut secret = revision(RELEASE, version, "deployed");
        secret["data"] = json!({"release": data});
        secret
    }

    fn owned(name: &str) -> Value {
        let mut object = config_map("t0", name);
        object["metadata"]["annotations"] = json!({
            "meta.helm.sh/release-name": RELEASE,
            "meta.helm.sh/release-namespace": "t0",
        });
        object
    }

    #[test]
    fn failed_upgrade_without_deployed_revision_is_found() {
        for (previous, oracle) in [
            ("deployed", None),
            ("superseded", Some("failed-upgrade-keeps-deployed")),
        ] {
            History::with_tenant()
                .put(HELM, "edge-1", revision(RELEASE, 1, previous))
                .put(HELM, "edge-1", revision(RELEASE, 2, "pending-upgrade"))
                .put(HELM, "edge-1", revision(RELEASE, 2, "failed"))
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn krypton_may_mark_any_revision_failed() {
        History::with_tenant()
            .put(HELM, "edge-1", revision(RELEASE, 1, "superseded"))
            .put(HELM, "edge-1", revision(RELEASE, 2, "pending-upgrade"))
            .put("agent-edge-1", "edge-1", revision(RELEASE, 2, "failed"))
            .assert_no_violation();
    }

    #[test]
    fn lower_revision_is_found() {
        for (next, oracle) in [(4, None), (2, Some("revisions-rise"))] {
            History::with_tenant()
                .put(HELM, "edge-1", revision(RELEASE, 3, "deployed"))
                .put(HELM, "edge-1", revision(RELEASE, next, "pending-upgrade"))
                .assert_outcome(oracle);
        }
    }

    #[test]
    fn deletion_of_a_locked_revision_is_found() {
        for (by, status, oracle) in [
            (
                "agent-edge-1",
                "pending-upgrade",
                Some("locked-revisions-stay"),
            ),
            ("agent-edge-1", "failed", None),
            (HELM, "uninstalling", None),
        ] {
            let mut locked = declaring(2, "settings");
            locked["metadata"]["labels"]["status"] = json!(status);
            let mut history = History::with_tenant();
            history.put(HELM, "edge-1", declaring(1, "settings"));
            history.put(HELM, "edge-1", locked.clone());
            history.delete(by, "edge-1", &locked);
            assert_eq!(history.violated_oracle(), oracle, "{status}");
        }
    }

    #[test]
    fn deletion_of_a_declared_object_is_found() {
        let objects_of = |named: &str| {
            let mut history = History::with_tenant();
            history
                .put(HELM, "edge-1", declaring(1, named))
                .put(HELM, "edge-1", owned("settings"));
            history
        };
        objects_of("settings")
            .delete(HELM, "edge-1", &owned("settings"))
            .assert_violated("objects-of-release-stay");
        objects_of("other")
            .delete(HELM, "edge-1", &owned("settings"))
            .assert_no_violation();
        objects_of("settings")
            .patch("people", "edge-1", tenant(), &deletion_patch())
            .delete(HELM, "edge-1", &owned("settings"))
            .assert_no_violation();
    }

    #[test]
    fn changed_uid_is_found() {
        let mut other = owned("settings");
        other["metadata"]["uid"] = json!("other");
        History::with_tenant()
            .put(HELM, "edge-1", owned("settings"))
            .put(HELM, "edge-1", other)
            .assert_violated("uid-never-changes");
    }
}
