//! Invariants of members that leave the fleet, come back, or are built again.

use std::collections::BTreeSet;

use krypton_helm::releases::labels::OWNER_UID_LABEL;
use krypton_types::names::{GROUP, ORPHAN_ANNOTATION, UNINSTALL_FINALIZER};
use serde_json::Value;

use super::releases::started;
use super::view::{annotation, has_finalizer, is_deleted, is_product, label, let_go, text};
use super::{Check, Oracle, View, ensure, stateless};
use crate::faults::{PEOPLE, REBUILD};
use crate::observe::{Event, Observation};
use crate::plan::{Action, ELSEWHERE, HOME, MemberAction, SYSTEM, Settings};

pub(super) fn all() -> Vec<Box<dyn Oracle>> {
    vec![
        Box::new(RetiredGo),
        Box::new(ReleasesGoFirst),
        Box::new(DismissedStayAway::default()),
        Box::new(RebuiltRest::default()),
    ]
}

fn uninstalls(member: &Value) -> bool {
    has_finalizer(member, UNINSTALL_FINALIZER)
        && is_deleted(member)
        && annotation(member, ORPHAN_ANNOTATION) != Some("true")
}

stateless! {
    /// A member that leaves with its releases goes, unless it is paused.
    RetiredGo, "retired-members-go",
    fn quiet(&mut self, view: &View) -> Check {
        for (key, member) in view.all(HOME, GROUP, "edgeclusters") {
            let paused = member.pointer("/spec/paused") == Some(&Value::Bool(true));
            let banned = member.pointer("/spec/banned") == Some(&Value::Bool(true));
            let separated = view.excused.as_deref() == Some(&key.name) || view.ever_restored();
            let held = paused || banned || separated || view.upgrades_fail();
            let stays = is_deleted(member) && (!uninstalls(member) || !held);
            ensure(!stays, || format!("EdgeCluster {} stays", key.name))?;
        }
        Ok(())
    }
}

stateless! {
    /// The hub lets a member go that leaves with its releases only after they are gone.
    ReleasesGoFirst, "releases-precede-member",
    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        let Some((cluster, change, before)) = let_go(seen, UNINSTALL_FINALIZER) else {
            return Ok(());
        };
        if cluster != HOME
            || change.key.resource != "edgeclusters"
            || !uninstalls(before)
            || text(before, "/spec/deletionPolicy") != "Uninstall"
            || view.ever_restored()
            || !view.has_crd(HOME, &format!("edgeclusters.{GROUP}"))
        {
            return Ok(());
        }
        let cluster = Settings::cluster(&change.key.name);
        for (_, tenant) in view.all(cluster, GROUP, "tenants") {
            let uid = text(tenant, "/metadata/uid");
            let orphan = annotation(tenant, ORPHAN_ANNOTATION) == Some("true");
            let mut secrets = view.all(cluster, "", "secrets");
            let left = secrets.any(|(_, secret)| label(secret, OWNER_UID_LABEL) == Some(uid));
            ensure(orphan || !left, || {
                let name = text(tenant, "/metadata/name");
                format!("{cluster} leaves before the release of {name}")
            })?;
        }
        Ok(())
    }
}

/// A member whose EdgeCluster people have deleted returns only after they have changed its Secret or invited its agent.
#[derive(Debug, Default)]
struct DismissedStayAway {
    dismissed: BTreeSet<String>,
}

impl Oracle for DismissedStayAway {
    fn name(&self) -> &'static str {
        "dismissed-member-stays-away"
    }

    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        if let Event::Fault { text } = &seen.event
            && let Ok(Action::Member {
                member,
                what: MemberAction::Rejoin,
            }) = text.parse()
        {
            self.dismissed.remove(&member);
        }
        let Event::Change { cluster, change } = &seen.event else {
            return Ok(());
        };
        let key = &change.key;
        if cluster != HOME || view.ever_restored() {
            return Ok(());
        }
        let secret =
            key.resource == "secrets" && [SYSTEM, ELSEWHERE].contains(&key.namespace.as_str());
        let member = key.resource == "edgeclusters";
        let gone = change.after.as_deref().is_none_or(is_deleted);
        let known = view.has_crd(HOME, &format!("edgeclusters.{GROUP}"));
        if change.by == PEOPLE && (secret || member && !gone) {
            self.dismissed.remove(&key.name);
        } else if change.by == PEOPLE && member && known {
            self.dismissed.insert(key.name.clone());
        }
        let returns = is_product(&change.by) && member && change.before.is_none();
        ensure(!returns || !self.dismissed.contains(&key.name), || {
            format!("{} lets {} return", change.by, key.name)
        })
    }
}

/// No process acts on a cluster that was built again until people have replaced its EdgeCluster.
#[derive(Debug, Default)]
struct RebuiltRest {
    rebuilt: BTreeSet<String>,
}

impl Oracle for RebuiltRest {
    fn name(&self) -> &'static str {
        "rebuilt-cluster-rests"
    }

    fn see(&mut self, view: &View, seen: &Observation) -> Check {
        if let Event::Change { cluster, change } = &seen.event {
            if change.by == REBUILD {
                self.rebuilt.insert(cluster.clone());
            }
            let replaced = change.key.resource == "edgeclusters" && change.after.is_none();
            if cluster == HOME && replaced {
                self.rebuilt.remove(Settings::cluster(&change.key.name));
            }
            let acts = is_product(&change.by) && self.rebuilt.contains(cluster);
            return ensure(!acts, || {
                let key = &change.key;
                format!(
                    "{} writes {} {} on {cluster}",
                    change.by, key.resource, key.name
                )
            });
        }
        let run = started(view, seen).and_then(|run| run.cluster.as_ref());
        let acts = run.is_some_and(|cluster| self.rebuilt.contains(cluster));
        ensure(!acts, || {
            format!("Helm runs on {run:?}, which was built again")
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::story::{Story, crd, deletion, edge_cluster, namespace, revision, tenant};
    use super::*;

    fn leaving() -> Value {
        let mut member = edge_cluster("edge-2");
        member["metadata"]["finalizers"] = json!([UNINSTALL_FINALIZER]);
        member["spec"] = json!({"deletionPolicy": "Uninstall"});
        member
    }

    /// A fleet whose home has the CRD of EdgeClusters.
    fn story() -> Story {
        let mut members = crd();
        members["metadata"]["name"] = json!(format!("edgeclusters.{GROUP}"));
        let mut story = Story::new();
        story.renew().put("people", "home", members);
        story
    }

    #[test]
    fn member_that_stays_is_found() {
        for (paused, broken) in [(true, false), (false, true)] {
            let mut member = leaving();
            member["spec"]["paused"] = json!(paused);
            let mut story = story();
            story.put("people", "home", member.clone()).patch(
                "people",
                "home",
                member,
                &deletion(),
            );
            assert_eq!(RetiredGo.quiet(story.view()).is_err(), broken);
        }
    }

    #[test]
    fn member_that_goes_before_its_releases_is_found() {
        let release = revision("tenant-t0-edge-2", 1, "deployed");
        for (gone, oracle) in [(true, None), (false, Some("releases-precede-member"))] {
            let mut story = story();
            story
                .put("people", "edge-2", tenant())
                .put("people", "edge-2", release.clone())
                .put("people", "home", leaving())
                .patch("people", "home", leaving(), &deletion());
            if gone {
                story.delete("helm:hub-0", "edge-2", &release);
            }
            story.delete("hub-0", "home", &leaving());
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn member_that_returns_by_itself_is_found() {
        let member = edge_cluster("edge-1");
        for (asked, oracle) in [(true, None), (false, Some("dismissed-member-stays-away"))] {
            let mut story = story();
            story
                .put("hub-0", "home", member.clone())
                .delete("people", "home", &member);
            if asked {
                story.fault("member edge-1 rejoin");
            }
            story.put("hub-0", "home", member.clone());
            assert_eq!(story.violated(), oracle);
        }
    }

    #[test]
    fn write_on_a_rebuilt_cluster_is_found() {
        let member = edge_cluster("edge-1");
        for (replaced, oracle) in [(true, None), (false, Some("rebuilt-cluster-rests"))] {
            let mut story = story();
            story.put("people", "home", member.clone()).put(
                REBUILD,
                "edge-1",
                namespace("default", false),
            );
            if replaced {
                story.delete("people", "home", &member);
            }
            story.put("agent-edge-1", "edge-1", namespace("t0", true));
            assert_eq!(story.violated(), oracle);
        }
    }
}
