//! Confirms a deletion before an uninstallation. A Tenant that is deleted together with its CRD keeps its release.

use krypton_crds::tenant::Tenant;
use krypton_runtime::call::call;
use krypton_runtime::newest::Newest as _;
use krypton_types::conditions::reason;
use krypton_types::deployment::DesiredDeployment;
use krypton_types::desired::DesiredState;
use krypton_types::names;

use super::{ActionError, ActionRunner, Job};
use crate::owner::ReleaseOwner;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::Api;
use kube::{CustomResourceExt, ResourceExt};

impl ActionRunner {
    /// Reads the deletion a second time. Fails if it is no longer valid, or if the CRD's deletion caused it.
    pub(super) async fn confirm_deletion(&self, job: &Job) -> Result<(), ActionError> {
        match &job.owner {
            ReleaseOwner::Tenant(tenant) => self.confirm_tenants_deletion(tenant).await,
            ReleaseOwner::Deployment(order) => {
                let confirmed = still_ordered(order, job.desired.retire, &self.desired.get());
                confirmed.then_some(()).ok_or(ActionError::Conflict)
            }
        }
    }

    pub(super) async fn confirm_tenants_deletion(
        &self,
        tenant: &Tenant,
    ) -> Result<(), ActionError> {
        let crds: Api<CustomResourceDefinition> = Api::all(self.client());
        let crd = call("reading the CRD", crds.get_metadata(Tenant::crd_name())).await?;
        if crd.metadata.deletion_timestamp.is_some() {
            return Err(ActionError::Conflict);
        }
        let times = [
            tenant.metadata.deletion_timestamp.as_ref(),
            crd.metadata.creation_timestamp.as_ref(),
        ];
        if let [Some(deleted), Some(made)] = times.map(|time| time.map(|time| time.0))
            && deleted < made
        {
            return Err(ActionError::Failed {
                reason: reason::UNINSTALL_FAILED,
                message: with_a_former_crd(),
                permanent: true,
            });
        }
        let api = self.tenants(&tenant.namespace().unwrap_or_default());
        let reading = api.get_metadata(tenant.metadata.name.as_deref().unwrap_or_default());
        let fresh = call("reading the Tenant again", reading).await?;
        let same = fresh.metadata.uid == tenant.metadata.uid
            && fresh.metadata.deletion_timestamp.is_some()
                == tenant.metadata.deletion_timestamp.is_some();
        // Only an order removes a Tenant that is not deleted. The hub may have withdrawn the order while the job
        // waited for its turn.
        let annotated =
            |name: &str| fresh.annotations().get(name) == tenant.annotations().get(name);
        let ordered = fresh.metadata.deletion_timestamp.is_some() || {
            let now = self.desired.get();
            now.retire
                && !now.paused
                && annotated(names::ORPHAN_ANNOTATION)
                && annotated(names::PAUSED_ANNOTATION)
        };
        let same = same && ordered;
        if same {
            Ok(())
        } else {
            Err(ActionError::Conflict)
        }
    }
}

/// Returns the message for a Tenant of a CRD whose finalizer a user removed. etcd keeps the Tenants of such a CRD.
/// After the CRD is recreated, they appear again with their deletion timestamps.
fn with_a_former_crd() -> String {
    format!(
        "this Tenant was deleted together with an earlier CRD, so nothing is uninstalled; to remove it and keep the release, annotate it with {}=true",
        names::ORPHAN_ANNOTATION
    )
}

/// Whether the latest desired state still orders the removal of the deployment as planned. The hub may have withdrawn
/// the order while the job waited for its turn.
fn still_ordered(order: &DesiredDeployment, retire: bool, now: &DesiredState) -> bool {
    let newest = now
        .deployments
        .iter()
        .find(|newest| newest.uid == order.uid && newest.key() == order.key());
    let ordered = |newest: &DesiredDeployment| {
        (newest.remove || (retire && now.retire))
            && newest.remove == order.remove
            && newest.orphan == order.orphan
            && !newest.paused
    };
    newest.is_some_and(ordered) && !now.paused
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
        let with = |change: fn(&mut DesiredDeployment)| {
            let mut newest = order.clone();
            change(&mut newest);
            still_ordered(&order, false, &desired(vec![newest]))
        };
        assert!(with(|_| {}));
        assert!(with(|newest| newest.generation += 1));
        assert!(!with(|newest| newest.remove = false));
        assert!(!with(|newest| newest.orphan = true));
        assert!(!with(|newest| newest.paused = true));
        assert!(!with(|newest| newest.uid = "uid-2".to_owned()));
        assert!(!with(|newest| newest.namespace = "other".to_owned()));
        let mut now = desired(Vec::new());
        assert!(!still_ordered(&order, false, &now), "no list says nothing");
        now.deployments.push(order.clone());
        now.paused = true;
        assert!(!still_ordered(&order, false, &now));

        // With the whole member, until the hub withdraws the order.
        let stays = DesiredDeployment {
            remove: false,
            ..order
        };
        let mut now = desired(vec![stays.clone()]);
        assert!(!still_ordered(&stays, true, &now));
        now.retire = true;
        assert!(still_ordered(&stays, true, &now));
    }
}
