//! What a person can do about what a condition says.

use krypton_common::conditions::reason as of_tenant;

use crate::facts::reason as of_member;

/// About a Tenant's conditions on one member. None where nothing has to be done, or the message says it.
pub(super) fn of_tenant(reason: &str) -> Option<&'static str> {
    Some(match reason {
        of_tenant::CHART_NOT_LOADED => {
            "see that the repository answers from where the hub runs, with the credentials it has; what is installed runs on"
        }
        of_tenant::VERSION_NOT_FOUND | of_tenant::VERSION_INVALID => {
            "correct --chart-version, and start the hub again"
        }
        of_tenant::INSTALL_FAILED | of_tenant::UPGRADE_FAILED => {
            "correct the chart or its values; the workload or Helm's words above tell which"
        }
        of_tenant::ROLLBACK_FAILED => "look at the release there with helm history",
        of_tenant::UNINSTALL_FAILED => {
            "see what Helm says; the annotation mesh.openkcm.io/orphan=true lets go and leaves the release"
        }
        of_tenant::HELM_UNAVAILABLE => {
            "it goes on within half a minute when helm can be begun there"
        }
        of_tenant::REQUEST_REFUSED => {
            "correct the right, admission policy or schema that the message names on that cluster; kubectl krypton resync skips the back-off"
        }
        of_tenant::SUSPENDED => "nothing: it goes on when the cluster takes writes again",
        of_tenant::NOT_READY => "look at the workload that is named, on that cluster",
        of_tenant::RELEASE_IN_USE => {
            "annotate with mesh.openkcm.io/adopt=true where the message offers it; else delete the Tenant, which leaves the release that is not its own, and create it anew with another spec.workspace"
        }
        of_tenant::RELEASE_TAMPERED => {
            "compare the Secret with the chart; delete it to render the chart again, or run kubectl krypton accept-release"
        }
        of_tenant::NAMESPACE_NOT_OWNED => {
            "delete the Tenant, and create it anew with another spec.workspace"
        }
        of_tenant::WORKSPACE_INVALID => "set spec.workspace to a legal name of a namespace",
        of_tenant::WORKSPACE_TERMINATING => {
            "it goes on when the namespace is gone; look for finalizers in it"
        }
        of_tenant::VALUES_NOT_ALLOWED => {
            "remove spec.values, or have the hub run with --tenant-values"
        }
        of_tenant::VALUES_TOO_LARGE => "shorten spec.values",
        of_tenant::NOT_THIS_CLUSTER => {
            "create it on the member that spec.clusterRef names, remove clusterRef, or have home place it (--place-tenants)"
        }
        of_tenant::NAMESPACE_NOT_ALLOWED => {
            "have the namespace listed in spec.allowedNamespaces of the EdgeCluster, or name another member"
        }
        of_tenant::CLUSTER_NOT_FOUND => {
            "correct spec.clusterRef, or add the cluster; kubectl krypton get clusters lists them"
        }
        of_tenant::CLUSTER_REF_CHANGED => {
            "put spec.clusterRef back; to move it, delete the Tenant, which uninstalls it unless it has the annotation mesh.openkcm.io/orphan=true, and create it anew"
        }
        of_tenant::ALREADY_THERE => {
            "it is shown, and left alone; deleting the one on the member has home place it, and uninstalls the release first unless that Tenant has the annotation mesh.openkcm.io/orphan=true"
        }
        of_tenant::BELONGS_TO_ANOTHER => {
            "annotate the Tenant at home with mesh.openkcm.io/adopt=true to take it over"
        }
        of_tenant::NOT_PLACING => "have the hub run with --place-tenants",
        _ => return None,
    })
}

/// About an EdgeCluster's conditions.
pub(super) fn of_member(reason: &str) -> Option<&'static str> {
    Some(match reason {
        of_member::AGENT_AWAY => {
            "look at the agent's log there, and at the way from there to the hub; it goes on meanwhile with what it has"
        }
        of_member::UNREACHABLE => {
            "see that its apiserver answers, and to these credentials; the hub tries again by itself"
        }
        of_member::KUBECONFIG_INVALID | of_member::CLIENT_FAILED => {
            "correct the kubeconfig in its Secret"
        }
        of_member::SOURCE_GONE => {
            "label its Secret again, or kubectl krypton leave NAME --orphan, which leaves what is installed"
        }
        of_member::DUPLICATE => "take one of the two members out of the fleet",
        of_member::RENAMED => {
            "put the Secret back under the old name, or kubectl krypton leave NAME --orphan for the old one: what is installed stays under its name, and all is installed anew"
        }
        of_member::IDENTITY_CHANGED => {
            "correct the kubeconfig; if the cluster was rebuilt: kubectl krypton join NAME --replace"
        }
        of_member::BANNED => "kubectl krypton unban lifts it",
        of_member::OBSERVING => {
            "somebody else holds its Lease and does the work: when that is its agent, look at its way to the hub"
        }
        of_member::SUSPENDED => "nothing: it goes on when that is over",
        of_member::VALUES_MISSING
        | of_member::VALUES_INVALID
        | of_member::VALUES_TOO_LARGE
        | of_member::NAMESPACES_INVALID => "correct what the message names; the last good stays",
        _ => return None,
    })
}
