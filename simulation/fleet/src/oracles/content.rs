//! The releases after all faults have ended: all that people have requested, with the right content, and no others.

use krypton_helm::releases::labels::OWNER_UID_LABEL;
use krypton_sim_apiserver::server::Key;
use krypton_types::names::{GROUP, HOME_UID_ANNOTATION, tenant_release};
use serde_json::Value;

use super::view::{is_ready, krypton_key, workspace};
use super::{CheckResult, Oracle, View, ensure, invariant};
use crate::object::{annotation, condition_text, is_terminating, is_true, label, text};
use crate::plan::{Access, HOME, SYSTEM_NAMESPACE, Settings, TENANT_NAMESPACE, VALUES_CONFIG_MAP};

invariant! {
    /// Each KryptonDeployment is ready at its generation. Its drift is always corrected, so no workload stays away.
    DeploymentsGetReady, "deployments-get-ready",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        if view.upgrades_fail() {
            return Ok(());
        }
        for (key, deployment) in view.objects(HOME, GROUP, "kryptondeployments") {
            if is_terminating(deployment) || !must_become_ready(view, deployment) {
                continue;
            }
            ensure(is_ready(deployment), || {
                let region = text(deployment, "/spec/region/name");
                let ready = condition_text(deployment, "Ready");
                format!("KryptonDeployment {} in {region} is not ready: {ready}", key.name)
            })?;
        }
        Ok(())
    }
}

/// Whether the member in the region of the KryptonDeployment must install the release.
fn must_become_ready(view: &View, deployment: &Value) -> bool {
    let region = text(deployment, "/spec/region/name");
    view.must_converge(region)
        && references_its_secret(view, deployment)
        && !view.awaits_undone_uninstallation(region, deployment)
}

/// Whether the KryptonDeployment names the Secret of a member without an agent. People cannot name it while it is
/// deleted.
fn references_its_secret(view: &View, deployment: &Value) -> bool {
    let region = text(deployment, "/spec/region/name");
    let mut edges = view.settings.edges.iter();
    let is_proxied = edges.any(|edge| edge.name == region && edge.access == Access::Kubeconfig);
    !is_proxied || text(deployment, "/spec/region/kubeconfig/secret/name") == region
}

invariant! {
    /// A member has only releases of KryptonDeployments that are in its region or cannot move to another one.
    RemovedDeploymentsGo, "removed-deployments-go",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        if view.upgrades_fail() {
            return Ok(());
        }
        for (member, _) in view.converging_members() {
            for (_, secret) in view.objects(Settings::cluster_for(member), "", "secrets") {
                let release = text(secret, "/metadata/labels/name");
                let Some(name) = release.strip_prefix("ced-") else {
                    continue;
                };
                let deployment = view.get(HOME, &krypton_key("kryptondeployments", TENANT_NAMESPACE, name));
                let is_ordered = deployment.is_some_and(|deployment| {
                    !is_terminating(deployment)
                        && (text(deployment, "/spec/region/name") == member
                            || cannot_move_from(view, deployment, member))
                });
                // The release of an orphan stays, even if people create it again in another region.
                let owner = label(secret, OWNER_UID_LABEL).unwrap_or_default();
                let is_ordered = is_ordered || view.orphaned_uids.contains(owner);
                // A restore brings back a release that was removed, or loses its KryptonDeployment.
                let is_removing = deployment.is_some_and(|deployment| is_recorded(deployment, member, true));
                let is_ordered = is_ordered || view.ever_restored() && !is_removing;
                ensure(is_ordered, || format!("{release} stays on {member}"))?;
            }
        }
        Ok(())
    }
}

invariant! {
    /// A KryptonDeployment that people have deleted disappears. It waits for each member that does not work.
    DeletedDeploymentsGo, "deleted-deployments-go",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        for (key, deployment) in view.objects(HOME, GROUP, "kryptondeployments") {
            ensure(!is_terminating(deployment) || deletion_may_wait(view, deployment), || {
                let ready = condition_text(deployment, "Ready");
                format!("KryptonDeployment {} stays: {ready}", key.name)
            })?;
        }
        Ok(())
    }
}

/// Whether the deletion of a KryptonDeployment may wait for a member.
pub(super) fn deletion_may_wait(view: &View, deployment: &Value) -> bool {
    let mut recorded = placements(deployment).map(|placement| text(placement, "/cluster"));
    let is_unrecorded = placements(deployment).next().is_none();
    view.all_hubs_lost
        || recorded.any(|member| !view.must_converge(member))
        || is_unrecorded && !must_become_ready(view, deployment)
}

/// Whether the hub may keep the release on this member because the new region has no working member. Once the hub has
/// recorded the removal, the release must go.
fn cannot_move_from(view: &View, deployment: &Value, member: &str) -> bool {
    is_recorded(deployment, member, false) && !must_become_ready(view, deployment)
}

/// Whether a restore brought back the release on a member that the KryptonDeployment has left, or undid the record of
/// it. The member has no order for it, so it stays as it is.
pub(super) fn has_left(view: &View, owner: &Value, member: &str) -> bool {
    // Tenants have no region.
    let region = text(owner, "/spec/region/name");
    view.ever_restored()
        && !region.is_empty()
        && region != member
        && placements(owner).all(|placement| text(placement, "/cluster") != member)
}

/// Whether the hub has recorded the release on this member, with or without its removal.
fn is_recorded(deployment: &Value, member: &str, removing: bool) -> bool {
    placements(deployment).any(|placement| {
        let is_removing = is_true(placement, "/removing");
        text(placement, "/cluster") == member && is_removing == removing
    })
}

/// Returns the clusters on which the release may be, as the hub has recorded them.
fn placements(deployment: &Value) -> impl Iterator<Item = &Value> {
    let placements = deployment.pointer("/status/placements");
    placements.and_then(Value::as_array).into_iter().flatten()
}

invariant! {
    /// The release of each Tenant has the chart version and the values that people want.
    ReleasesAreCurrent, "releases-are-current",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        if view.upgrades_fail() {
            return Ok(());
        }
        let fleet_message = view.get(HOME, &config_map(SYSTEM_NAMESPACE, VALUES_CONFIG_MAP));
        let fleet_message = fleet_message.map_or("", |values| text(values, "/data/values.yaml"));
        let fleet_message = fleet_message.trim().strip_prefix("message: ").unwrap_or_default();
        let version = format!("0.{}.0", view.chart_version);
        for (tenant_cluster, member, tenant) in view.ready_tenants() {
            let (name, cluster) = (text(tenant, "/metadata/name"), Settings::cluster_for(&member));
            let copy = view.tenant(cluster, name);
            let owner = copy.and_then(|copy| annotation(copy, HOME_UID_ANNOTATION));
            // The member can still have the orphan of an earlier Tenant of this name.
            if tenant_cluster != cluster && owner != Some(text(tenant, "/metadata/uid")) {
                continue;
            }
            let release = tenant_release(name, &member);
            let key = config_map(workspace(tenant), &format!("{release}-config"));
            // People may have deleted it. Without drift correction, it is missing until the next upgrade.
            let object = view.get(cluster, &key);
            let Some(object) = object.filter(|_| !view.is_partly_restored(&release)) else {
                continue;
            };
            let message = match text(tenant, "/spec/values/message") {
                "" => fleet_message,
                own => own,
            };
            let actual = (text(object, "/data/version"), text(object, "/data/message"));
            ensure(actual == (&version, message), || {
                format!("{release} has {actual:?} instead of {version} with {message}")
            })?;
        }
        Ok(())
    }
}

fn config_map(namespace: &str, name: &str) -> Key {
    Key::new("", "configmaps", namespace, name)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::story::{self, History, deletion_patch, deployment, ready_patch, workload};

    fn content(version: &str, message: &str) -> serde_json::Value {
        let mut object = story::config_map("t0", "tenant-t0-edge-1-config");
        object["data"] = json!({"version": version, "message": message});
        object
    }

    #[test]
    fn deployment_that_is_not_ready_is_found() {
        for (generation, oracle) in [(1, None), (2, Some("deployments-get-ready"))] {
            let violated = History::violated_after(|history| {
                let newer = json!({"metadata": {"generation": generation}});
                history
                    .put("people", "home", deployment("edge-1"))
                    .patch("hub-0", "home", deployment("edge-1"), &ready_patch(1))
                    .patch("people", "home", deployment("edge-1"), &newer);
            });
            assert_eq!(violated.as_deref(), oracle);
        }
    }

    #[test]
    fn missing_workload_of_tenant_excuses_no_deployment() {
        for (is_ready, oracle) in [(true, None), (false, Some("deployments-get-ready"))] {
            let violated = History::violated_after(|history| {
                history
                    .put("controller", "edge-1", workload())
                    .delete("people", "edge-1", &workload())
                    .put("people", "home", deployment("edge-1"));
                if is_ready {
                    history.patch("hub-0", "home", deployment("edge-1"), &ready_patch(1));
                }
            });
            assert_eq!(violated.as_deref(), oracle);
        }
    }

    #[test]
    fn release_of_removed_deployment_is_found() {
        for (region, oracle) in [("edge-1", None), ("edge-9", Some("removed-deployments-go"))] {
            let violated = History::violated_after(|history| {
                history
                    .put("people", "home", deployment(region))
                    .patch("hub-0", "home", deployment(region), &ready_patch(1))
                    .put_revision("ced-d0", 1, "deployed");
            });
            assert_eq!(violated.as_deref(), oracle);
        }
        let violated = History::violated_after(|history| {
            history
                .put("people", "home", deployment("edge-1"))
                .put_revision("ced-d0", 1, "deployed")
                .patch("people", "home", deployment("edge-1"), &deletion_patch());
        });
        assert_eq!(violated.as_deref(), Some("removed-deployments-go"));
    }

    #[test]
    fn release_that_cannot_move_may_stay() {
        const STAYS: Option<&str> = Some("removed-deployments-go");
        for (banned, placement, oracle) in [
            (true, json!({"cluster": "edge-1"}), None),
            (true, json!({"cluster": "edge-1", "removing": true}), STAYS),
            (true, json!({"cluster": "edge-2"}), STAYS),
            (false, json!({"cluster": "edge-1"}), STAYS),
        ] {
            let moved = || {
                let mut moved = deployment("edge-2");
                let secret = json!({"secret": {"name": "edge-2"}});
                moved["spec"]["region"]["kubeconfig"] = secret;
                moved
            };
            let placements = json!({"status": {"placements": [placement]}});
            let violated = History::violated_after(|history| {
                let ban = json!({"spec": {"banned": banned}});
                history
                    .patch("people", "home", story::edge_cluster("edge-2"), &ban)
                    .put("people", "home", moved())
                    .patch("hub-0", "home", moved(), &ready_patch(1))
                    .patch("hub-0", "home", moved(), &placements)
                    .put_revision("ced-d0", 1, "deployed");
            });
            assert_eq!(violated.as_deref(), oracle, "{placements}");
        }
    }

    #[test]
    fn release_with_old_content_is_found() {
        let values = |message: &str| {
            let mut values = story::config_map("krypton-system", "fleet-values");
            values["data"] = json!({"values.yaml": format!("message: {message}\n")});
            values
        };
        for (version, message, oracle) in [
            ("0.2.0", "fleet-3", None),
            ("0.1.0", "fleet-3", Some("releases-are-current")),
            ("0.2.0", "fleet-2", Some("releases-are-current")),
        ] {
            let violated = History::violated_after(|history| {
                history
                    .put("people", "home", values("fleet-3"))
                    .fault("chart-version 2")
                    .put("helm:agent-edge-1", "edge-1", content(version, message));
            });
            assert_eq!(violated.as_deref(), oracle);
        }
    }
}
