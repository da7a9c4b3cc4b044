//! Confirms a deletion before an uninstallation. A Tenant that is deleted together with its CRD keeps its release.

use krypton_crds::tenant::Tenant;
use krypton_runtime::call::call;
use krypton_runtime::newest::Newest as _;
use krypton_types::conditions::reason;
use krypton_types::deployment::DesiredDeployment;
use krypton_types::desired::DesiredState;
use krypton_types::names;
use krypton_types::tenant::Lifetime;

use super::{ActionError, ActionResult, ActionRunner, Job};
use crate::owner::ReleaseOwner;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::Api;
use kube::{CustomResourceExt, ResourceExt};

impl ActionRunner {
    /// Reads the deletion a second time. Fails if it is no longer valid, or if the CRD's deletion caused it.
    pub(super) async fn confirm_deletion(&self, job: &Job) -> ActionResult {
        match &job.owner {
            ReleaseOwner::Tenant(tenant) => self.confirm_tenants_deletion(tenant).await,
            ReleaseOwner::Deployment(order) => {
                let is_ordered = is_still_ordered(order, job.desired.retire, &self.desired.get());
                is_ordered.then_some(()).ok_or(ActionError::Conflict)
            }
        }
    }

    pub(super) async fn confirm_tenants_deletion(&self, tenant: &Tenant) -> ActionResult {
        let crds: Api<CustomResourceDefinition> = Api::all(self.client());
        let crd = call("reading the CRD", crds.get_metadata(Tenant::crd_name())).await?;
        if crd.metadata.deletion_timestamp.is_some() {
            return Err(ActionError::Conflict);
        }
        let crd_created = crd.metadata.creation_timestamp.map(|time| time.0);
        if Lifetime::new(&tenant.metadata).ended_before(crd_created) {
            return Err(ActionError::permanent(
                reason::UNINSTALL_FAILED,
                deleted_with_earlier_crd(),
            ));
        }
        let api = self.tenants(&tenant.namespace().unwrap_or_default());
        let reading = api.get_metadata(tenant.metadata.name.as_deref().unwrap_or_default());
        let current = call("reading the Tenant again", reading).await?;
        let is_same = current.metadata.uid == tenant.metadata.uid
            && current.metadata.deletion_timestamp.is_some()
                == tenant.metadata.deletion_timestamp.is_some();
        // People and the hub may have decided otherwise while the job waited for its turn. Only an order removes a
        // Tenant that is not deleted.
        let has_same_annotation =
            |name: &str| current.annotations().get(name) == tenant.annotations().get(name);
        let desired = self.desired.get();
        let is_ordered = (current.metadata.deletion_timestamp.is_some() || desired.retire)
            && !desired.paused
            && has_same_annotation(names::ORPHAN_ANNOTATION)
            && has_same_annotation(names::PAUSED_ANNOTATION);
        (is_same && is_ordered)
            .then_some(())
            .ok_or(ActionError::Conflict)
    }
}

/// Returns the message for a Tenant of a CRD whose finalizer a user removed. etcd keeps the Tenants of such a CRD.
/// After the CRD is recreated, they appear again with their deletion timestamps.
fn deleted_with_earlier_crd() -> String {
    format!(
        "this Tenant was deleted together with an earlier CRD, so nothing is uninstalled; to remove it and keep the release, annotate it with {}=true",
        names::ORPHAN_ANNOTATION
    )
}

/// Whether the latest desired state still orders the removal of the deployment as planned. The hub may have withdrawn
/// the order while the job waited for its turn.
fn is_still_ordered(order: &DesiredDeployment, retire: bool, desired: &DesiredState) -> bool {
    let newest = desired
        .deployments
        .iter()
        .find(|newest| newest.uid == order.uid && newest.key() == order.key());
    let is_ordered = |newest: &DesiredDeployment| {
        (newest.remove || (retire && desired.retire))
            && newest.remove == order.remove
            && newest.orphan == order.orphan
            && !newest.paused
    };
    newest.is_some_and(is_ordered) && !desired.paused
}

#[cfg(test)]
mod tests {
    use krypton_types::desired::ChartState;

    use super::*;

    fn desired(deployments: Vec<DesiredDeployment>) -> DesiredState {
        DesiredState {
            chart: ChartState {
                name: "small".to_owned(),
                ..ChartState::default()
            },
            deployments,
            ..DesiredState::default()
        }
    }

    #[test]
    fn deployment_is_removed_only_while_order_is_current() {
        let order = DesiredDeployment {
            namespace: "accounts".to_owned(),
            name: "acme".to_owned(),
            uid: "uid-1".to_owned(),
            remove: true,
            ..DesiredDeployment::default()
        };
        let ordered_after = |change: fn(&mut DesiredDeployment)| {
            let mut newest = order.clone();
            change(&mut newest);
            is_still_ordered(&order, false, &desired(vec![newest]))
        };
        assert!(ordered_after(|_| {}));
        assert!(ordered_after(|newest| newest.generation += 1));
        assert!(!ordered_after(|newest| newest.remove = false));
        assert!(!ordered_after(|newest| newest.orphan = true));
        assert!(!ordered_after(|newest| newest.paused = true));
        assert!(!ordered_after(|newest| newest.uid = "uid-2".to_owned()));
        assert!(!ordered_after(
            |newest| newest.namespace = "other".to_owned()
        ));
        // An empty list orders nothing.
        let mut current = desired(Vec::new());
        assert!(!is_still_ordered(&order, false, &current));
        current.deployments.push(order.clone());
        current.paused = true;
        assert!(!is_still_ordered(&order, false, &current));

        // With the whole member, until the hub withdraws the order.
        let retained = DesiredDeployment {
            remove: false,
            ..order
        };
        let mut current = desired(vec![retained.clone()]);
        assert!(!is_still_ordered(&retained, true, &current));
        current.retire = true;
        assert!(is_still_ordered(&retained, true, &current));
    }
}
