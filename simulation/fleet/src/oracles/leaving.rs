//! Invariants of members that leave the fleet, come back, or are built again.

use std::collections::BTreeSet;

use krypton_helm::releases::labels::OWNER_UID_LABEL;
use krypton_sim_apiserver::server::Key;
use krypton_types::names::{DISCOVERY_LABEL, GROUP, ORPHAN_ANNOTATION, UNINSTALL_FINALIZER};
use serde_json::Value;

use super::view::{finalizer_removal, is_product};
use super::{Change, CheckResult, Oracle, Run, View, ensure, invariant};
use crate::faults::REBUILD_WRITER;
use crate::object::{annotation, has_finalizer, is_terminating, is_true, label, text};
use crate::observe::Observation;
use crate::plan::{Action, HOME, MemberAction, SYSTEM_NAMESPACE, Settings, UNTRUSTED_NAMESPACE};
use crate::user_client::PEOPLE;

fn must_uninstall(member: &Value) -> bool {
    has_finalizer(member, UNINSTALL_FINALIZER)
        && is_terminating(member)
        && annotation(member, ORPHAN_ANNOTATION) != Some("true")
}

invariant! {
    /// A member that leaves with its releases is deleted, unless it is paused.
    RetiredMembersGo, "retired-members-go",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        for (key, member) in view.objects(HOME, GROUP, "edgeclusters") {
            let paused = is_true(member, "/spec/paused");
            let banned = is_true(member, "/spec/banned");
            let separated = view.separated_member.as_deref() == Some(&key.name) || view.ever_restored();
            let may_stay = paused || banned || separated || view.upgrades_fail();
            let is_stuck = is_terminating(member) && (!must_uninstall(member) || !may_stay);
            ensure(!is_stuck, || format!("EdgeCluster {} stays", key.name))?;
        }
        Ok(())
    }
}

invariant! {
    /// The hub removes a member that leaves with its releases only after they are gone.
    ReleasesPrecedeMember, "releases-precede-member",
    fn check_observation(&mut self, view: &View, observation: &Observation) -> CheckResult {
        let Some((cluster, change, before)) = finalizer_removal(observation, UNINSTALL_FINALIZER) else {
            return Ok(());
        };
        if cluster != HOME
            || change.key.resource != "edgeclusters"
            || !must_uninstall(before)
            || text(before, "/spec/deletionPolicy") != "Uninstall"
            || view.ever_restored()
            || !view.has_crd(HOME, &format!("edgeclusters.{GROUP}"))
        {
            return Ok(());
        }
        let cluster = Settings::cluster_for(&change.key.name);
        for (_, tenant) in view.objects(cluster, GROUP, "tenants") {
            let uid = text(tenant, "/metadata/uid");
            let is_orphan = annotation(tenant, ORPHAN_ANNOTATION) == Some("true");
            let mut secrets = view.objects(cluster, "", "secrets");
            let has_release = secrets.any(|(_, secret)| label(secret, OWNER_UID_LABEL) == Some(uid));
            ensure(is_orphan || !has_release, || {
                let name = text(tenant, "/metadata/name");
                format!("{cluster} leaves before the release of {name}")
            })?;
        }
        Ok(())
    }
}

invariant! {
    /// A member whose EdgeCluster people have deleted returns only after they have changed its Secret, invited its agent, or
    /// deleted the CRD. If its Secret has no label, they may also name it in a KryptonDeployment.
    DismissedMemberStaysAway {
        dismissed: BTreeSet<String>,
    },
    "dismissed-member-stays-away",
    fn check_observation(&mut self, _: &View, observation: &Observation) -> CheckResult {
        if let Some((Action::Member { member, action }, _)) = observation.event.action()
            && action == MemberAction::Rejoin
        {
            self.dismissed.remove(&member);
        }
        Ok(())
    }

    fn check_change(&mut self, view: &View, cluster: &str, change: &Change) -> CheckResult {
        let key = &change.key;
        if cluster != HOME || view.ever_restored() {
            return Ok(());
        }
        let is_source_secret = key.resource == "secrets"
            && [SYSTEM_NAMESPACE, UNTRUSTED_NAMESPACE].contains(&key.namespace.as_str());
        let is_member = key.resource == "edgeclusters";
        let is_gone = change.after.as_deref().is_none_or(is_terminating);
        let crd = format!("edgeclusters.{GROUP}");
        let crd_exists = || view.has_crd(HOME, &crd);
        if is_gone && *key == Key::of_crd(&crd) {
            // The hub recreates all members then.
            self.dismissed.clear();
        } else if change.by == PEOPLE && (is_source_secret || is_member && !is_gone) {
            self.dismissed.remove(&key.name);
        } else if change.by == PEOPLE && is_member && crd_exists() {
            self.dismissed.insert(key.name.clone());
        } else if change.by == PEOPLE && let Some(secret) = newly_named_secret(change) {
            // A labelled Secret is a source, whether or not it is named.
            self.dismissed.retain(|member| member != secret || is_labelled(view, secret));
        }
        let is_return = is_product(&change.by) && is_member && change.before.is_none();
        ensure(!is_return || !self.dismissed.contains(&key.name), || {
            format!("{} lets {} return", change.by, key.name)
        })
    }
}

/// Returns the Secret that a KryptonDeployment names only since this change.
fn newly_named_secret(change: &Change) -> Option<&str> {
    let path = "/spec/region/kubeconfig/secret/name";
    let secret = text(change.after.as_deref()?, path);
    let before = change.before.as_deref().map(|before| text(before, path));
    let is_deployment = change.key.resource == "kryptondeployments";
    (is_deployment && before != Some(secret)).then_some(secret)
}

fn is_labelled(view: &View, secret: &str) -> bool {
    let mut secrets = view.objects(HOME, "", "secrets");
    secrets
        .any(|(key, object)| key.name == secret && label(object, DISCOVERY_LABEL) == Some("true"))
}

invariant! {
    /// No process acts on a cluster that was built again until people have replaced its EdgeCluster.
    RebuiltClusterRests {
        rebuilt: BTreeSet<String>,
    },
    "rebuilt-cluster-rests",
    fn check_change(&mut self, _: &View, cluster: &str, change: &Change) -> CheckResult {
        let key = &change.key;
        if change.by == REBUILD_WRITER {
            self.rebuilt.insert(cluster.to_owned());
        }
        if cluster == HOME && key.resource == "edgeclusters" && change.after.is_none() {
            self.rebuilt.remove(Settings::cluster_for(&key.name));
        }
        let is_acting = is_product(&change.by) && self.rebuilt.contains(cluster);
        ensure(!is_acting, || {
            let (resource, name) = (&key.resource, &key.name);
            format!("{} writes {resource} {name} on {cluster}", change.by)
        })
    }

    fn check_helm_start(&mut self, _: &View, run: &Run) -> CheckResult {
        let cluster = run.cluster.as_ref();
        let is_acting = cluster.is_some_and(|cluster| self.rebuilt.contains(cluster));
        ensure(!is_acting, || {
            format!("Helm runs on {cluster:?}, which was built again")
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::story::{
        History, crd, deletion_patch, deployment, edge_cluster, namespace, revision, tenant,
    };
    use super::*;

    fn leaving() -> Value {
        let mut member = edge_cluster("edge-2");
        member["metadata"]["finalizers"] = json!([UNINSTALL_FINALIZER]);
        member["spec"] = json!({"deletionPolicy": "Uninstall"});
        member
    }

    /// A fleet whose home has the CRD of EdgeClusters.
    fn history() -> History {
        let mut history = History::new();
        history
            .renew_leases()
            .put("people", "home", crd("edgeclusters"));
        history
    }

    #[test]
    fn member_that_stays_is_found() {
        for (paused, broken) in [(true, false), (false, true)] {
            let mut member = leaving();
            member["spec"]["paused"] = json!(paused);
            let mut history = history();
            history.put("people", "home", member.clone()).patch(
                "people",
                "home",
                member,
                &deletion_patch(),
            );
            assert_eq!(history.breaks(RetiredMembersGo::default()), broken);
        }
    }

    #[test]
    fn member_that_goes_before_its_releases_is_found() {
        let release = revision("tenant-t0-edge-2", 1, "deployed");
        for (gone, oracle) in [(true, None), (false, Some("releases-precede-member"))] {
            let mut history = history();
            history
                .put("people", "edge-2", tenant())
                .put("people", "edge-2", release.clone())
                .put("people", "home", leaving())
                .patch("people", "home", leaving(), &deletion_patch());
            if gone {
                history.delete("helm:hub-0", "edge-2", &release);
            }
            history.delete("hub-0", "home", &leaving());
            assert_eq!(history.violated_oracle(), oracle);
        }
    }

    #[test]
    fn member_that_returns_without_user_is_found() {
        let member = edge_cluster("edge-1");
        let returned = Some("dismissed-member-stays-away");
        for (rejoins, loses_crd, oracle) in [
            (true, false, None),
            (false, true, None),
            (false, false, returned),
        ] {
            let mut history = history();
            history
                .put("hub-0", "home", member.clone())
                .delete("people", "home", &member);
            if rejoins {
                history.fault("member edge-1 rejoin");
            }
            if loses_crd {
                history.delete("people", "home", &crd("edgeclusters"));
            }
            history.put("hub-0", "home", member.clone());
            assert_eq!(history.violated_oracle(), oracle);
        }
    }

    #[test]
    fn dismissed_member_may_return_when_newly_named() {
        let member = edge_cluster("edge-2");
        let returned = Some("dismissed-member-stays-away");
        for (is_labelled, was_named, oracle) in [
            (false, false, None),
            (true, false, returned),
            (false, true, returned),
        ] {
            let secret = json!({
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {
                    "name": "edge-2",
                    "namespace": "krypton",
                    "labels": {DISCOVERY_LABEL: is_labelled.to_string()},
                },
            });
            let mut naming = deployment("edge-2");
            naming["spec"]["region"]["kubeconfig"] = json!({"secret": {"name": "edge-2"}});
            let mut history = history();
            history
                .put("people", "home", secret)
                .put("hub-0", "home", member.clone());
            if was_named {
                history.put("people", "home", naming.clone());
            }
            history
                .delete("people", "home", &member)
                .put("people", "home", naming)
                .put("hub-0", "home", member.clone());
            assert_eq!(history.violated_oracle(), oracle);
        }
    }

    #[test]
    fn write_on_a_rebuilt_cluster_is_found() {
        let member = edge_cluster("edge-1");
        for (replaced, oracle) in [(true, None), (false, Some("rebuilt-cluster-rests"))] {
            let mut history = history();
            history.put("people", "home", member.clone()).put(
                REBUILD_WRITER,
                "edge-1",
                namespace("default", false),
            );
            if replaced {
                history.delete("people", "home", &member);
            }
            history.put("agent-edge-1", "edge-1", namespace("t0", true));
            assert_eq!(history.violated_oracle(), oracle);
        }
    }
}
