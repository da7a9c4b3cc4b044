//! Actions of people.

mod members;
mod tenants;

use krypton_types::{ca_rotation, names};
use serde_json::{Value, json};

use self::members::perform_member_action;
use self::tenants::perform_tenant_action;
use crate::conductor::Simulation;
use crate::plan::{
    Action, DeploymentAction, HOME, SYSTEM_NAMESPACE, TENANT_NAMESPACE, VALUES_CONFIG_MAP,
};
use crate::user_client::UserClient;
pub(super) use members::{delete_member_without_source, rejoin_agent, temporary_source};
pub(super) use tenants::{delete_forged, orphan_unreadable_tenants, remove_foreign};

/// Starts the keys of labels, annotations and finalizers that people write.
pub const FOREIGN_PREFIX: &str = "people.example/";

const KRYPTON_API: &str = "/apis/mesh.openkcm.io/v1alpha1";

/// Executes an action of a user.
pub(super) fn perform(simulation: &mut Simulation, action: &Action) {
    match action {
        Action::Tenant {
            cluster,
            tenant,
            action,
        } => perform_tenant_action(simulation, (cluster, tenant), action),
        Action::Member { member, action } => perform_member_action(simulation, member, action),
        Action::Deployment { name, action } => perform_deployment_action(simulation, name, action),
        Action::Values { number } => {
            let data = json!({"values.yaml": format!("message: fleet-{number}\n")});
            let mut client = UserClient::for_home(simulation);
            let collection = format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/configmaps");
            if client.patch(
                &format!("{collection}/{VALUES_CONFIG_MAP}"),
                &json!({"data": data}),
            ) == 404
            {
                let metadata = json!({"name": VALUES_CONFIG_MAP, "namespace": SYSTEM_NAMESPACE});
                let new = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data});
                client.create(&collection, &new);
            }
        }
        Action::RotateCa => {
            let now = simulation.wall_time().to_string();
            let path = format!(
                "/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets/{}",
                names::CA_SECRET
            );
            let mut client = UserClient::for_home(simulation);
            client.annotate(&path, ca_rotation::REQUEST_ANNOTATION, now);
        }
        Action::DeleteCrd { cluster } => {
            delete_crd(simulation, cluster, "tenants");
        }
        Action::DeleteHomeCrd { resource } => delete_crd(simulation, HOME, resource),
        Action::DeleteAnchor { cluster } => {
            let path =
                format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/configmaps/krypton-root-owner");
            UserClient::new(simulation, cluster).delete(&path);
        }
        Action::DeleteEpoch => {
            let name = names::EPOCH_CONFIG_MAP;
            let path = format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/configmaps/{name}");
            UserClient::for_home(simulation).delete(&path);
        }
        _ => {}
    }
}

fn delete_crd(simulation: &mut Simulation, cluster: &str, resource: &str) {
    let crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    let path = format!("{crds}/{resource}.{}", names::GROUP);
    UserClient::new(simulation, cluster).delete(&path);
}

fn perform_deployment_action(simulation: &mut Simulation, name: &str, action: &DeploymentAction) {
    let collection = format!("{KRYPTON_API}/namespaces/{TENANT_NAMESPACE}/kryptondeployments");
    let path = format!("{collection}/{name}");
    let mut client = UserClient::for_home(simulation);
    match action {
        DeploymentAction::Create { region } => {
            let region = region_spec(&mut client, region);
            client.create(&collection, &deployment_object(name, &region));
        }
        DeploymentAction::Edit { number } => {
            let account = json!({"name": "account", "displayName": format!("account {number}")});
            client.patch(&path, &json!({"spec": {"account": account}}));
        }
        DeploymentAction::Move { region } => {
            let region = region_spec(&mut client, region);
            // Without null, a merge patch keeps the previous region's Secret.
            let mut patch = json!({"kubeconfig": null});
            for (field, value) in region.as_object().into_iter().flatten() {
                patch[field] = value.clone();
            }
            client.patch(&path, &json!({"spec": {"region": patch}}));
        }
        DeploymentAction::Delete => {
            client.delete(&path);
        }
        DeploymentAction::Orphan => {
            client.annotate(&path, names::ORPHAN_ANNOTATION, "true");
            client.delete(&path);
        }
    }
}

/// Returns the `region` field of a KryptonDeployment: the name and, for a member without an agent, the Secret with its
/// kubeconfig. The Secret has the label [`names::OPEN_TO_DEPLOYMENTS_LABEL`].
fn region_spec(client: &mut UserClient<'_>, region: &str) -> Value {
    match client.get(&format!(
        "/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets/{region}"
    )) {
        Some(_) => {
            let secret = json!({"name": region, "namespace": SYSTEM_NAMESPACE});
            json!({"name": region, "kubeconfig": {"secret": secret}})
        }
        None => json!({"name": region}),
    }
}

fn deployment_object(name: &str, region: &Value) -> Value {
    json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1",
        "kind": "KryptonDeployment",
        "metadata": {"name": name, "namespace": TENANT_NAMESPACE},
        "spec": {"account": {"name": "account"}, "region": region},
    })
}

fn text<'a>(object: &'a Value, pointer: &str) -> Option<&'a str> {
    object.pointer(pointer)?.as_str()
}

#[cfg(test)]
mod tests {
    use krypton_crds::krypton_deployment::KryptonDeployment;
    use krypton_crds::tenant::Tenant;

    use super::tenants::tenant_object;
    use super::*;

    #[test]
    fn objects_of_people_fit_the_types() {
        let placed: Tenant = serde_json::from_value(tenant_object("t0", Some("edge-1"))).unwrap();
        assert_eq!(placed.referenced_member(), Some("edge-1"));
        let plain: Tenant = serde_json::from_value(tenant_object("t0", None)).unwrap();
        assert_eq!(plain.referenced_member(), None);
        let object = deployment_object("d0", &json!({"name": "edge-1"}));
        let deployment: KryptonDeployment = serde_json::from_value(object).unwrap();
        assert_eq!(deployment.spec.region.name, "edge-1");
    }
}
