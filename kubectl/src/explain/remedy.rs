//! Maps the reason of a condition to an action that the user can take.

use krypton_types::conditions::reason;

/// For a Tenant's conditions on one member. `None` if no action is needed or the message contains it.
pub(super) fn of_tenant(reason: &str) -> Option<&'static str> {
    Some(match reason {
        reason::CHART_NOT_LOADED => {
            "see that the repository answers from where the hub runs, with the credentials it has; what is installed runs on"
        }
        reason::VERSION_NOT_FOUND | reason::VERSION_INVALID => {
            "correct --chart-version, and start the hub again"
        }
        reason::INSTALL_FAILED | reason::UPGRADE_FAILED => {
            "correct the chart or its values; the workload or Helm's words above tell which"
        }
        reason::ROLLBACK_FAILED => "look at the release there with helm history",
        reason::UNINSTALL_FAILED => {
            "see what Helm says; the annotation mesh.openkcm.io/orphan=true lets go and leaves the release"
        }
        reason::HELM_UNAVAILABLE => "it goes on within half a minute when helm can be begun there",
        reason::REQUEST_REFUSED => {
            "correct the right, admission policy or schema that the message names on that cluster; kubectl krypton resync skips the back-off"
        }
        reason::SUSPENDED => "nothing: it goes on when the cluster takes writes again",
        reason::NOT_READY => "look at the workload that is named, on that cluster",
        reason::RELEASE_IN_USE => {
            "annotate with mesh.openkcm.io/adopt=true where the message offers it; else delete the Tenant, which leaves the release that is not its own, and create it anew with another spec.workspace"
        }
        reason::RELEASE_TAMPERED => {
            "compare the Secret with the chart; delete it to render the chart again, or run kubectl krypton accept-release"
        }
        reason::NAMESPACE_NOT_OWNED => {
            "delete the Tenant, and create it anew with another spec.workspace"
        }
        reason::WORKSPACE_INVALID => "set spec.workspace to a legal name of a namespace",
        reason::WORKSPACE_TERMINATING => {
            "it goes on when the namespace is gone; look for finalizers in it"
        }
        reason::VALUES_NOT_ALLOWED => {
            "remove spec.values, or have the hub run with --tenant-values"
        }
        reason::VALUES_TOO_LARGE => "shorten spec.values",
        reason::NOT_THIS_CLUSTER => {
            "create it on the member that spec.clusterRef names, remove clusterRef, or have home place it (--place-tenants)"
        }
        reason::NAMESPACE_NOT_ALLOWED => {
            "have the namespace listed in spec.allowedNamespaces of the EdgeCluster, or name another member"
        }
        reason::CLUSTER_NOT_FOUND => {
            "correct spec.clusterRef, or add the cluster; kubectl krypton get clusters lists them"
        }
        reason::CLUSTER_REF_CHANGED => {
            "put spec.clusterRef back; to move it, delete the Tenant, which uninstalls it unless it has the annotation mesh.openkcm.io/orphan=true, and create it anew"
        }
        reason::ALREADY_THERE => {
            "it is shown, and left alone; deleting the one on the member has home place it, and uninstalls the release first unless that Tenant has the annotation mesh.openkcm.io/orphan=true"
        }
        reason::BELONGS_TO_ANOTHER => {
            "annotate the Tenant at home with mesh.openkcm.io/adopt=true to take it over"
        }
        reason::NOT_PLACING => "have the hub run with --place-tenants",
        _ => return None,
    })
}

/// For the conditions of an EdgeCluster.
pub(super) fn of_member(reason: &str) -> Option<&'static str> {
    Some(match reason {
        reason::AGENT_AWAY => {
            "look at the agent's log there, and at the way from there to the hub; it goes on meanwhile with what it has"
        }
        reason::UNREACHABLE => {
            "see that its apiserver answers, and to these credentials; the hub tries again by itself"
        }
        reason::KUBECONFIG_INVALID | reason::CLIENT_FAILED => {
            "correct the kubeconfig in its Secret"
        }
        reason::SOURCE_GONE => {
            "label its Secret again, or kubectl krypton leave NAME --orphan, which leaves what is installed"
        }
        reason::DUPLICATE => "take one of the two members out of the fleet",
        reason::RENAMED => {
            "put the Secret back under the old name, or kubectl krypton leave NAME --orphan for the old one: what is installed stays under its name, and all is installed anew"
        }
        reason::IDENTITY_CHANGED => {
            "correct the kubeconfig; if the cluster was rebuilt: kubectl krypton join NAME --replace"
        }
        reason::BANNED => "kubectl krypton unban lifts it",
        reason::OBSERVING => {
            "somebody else holds its Lease and does the work: when that is its agent, look at its way to the hub"
        }
        reason::SUSPENDED => "nothing: it goes on when that is over",
        reason::VALUES_MISSING
        | reason::VALUES_INVALID
        | reason::VALUES_TOO_LARGE
        | reason::NAMESPACES_INVALID => "correct what the message names; the last good stays",
        _ => return None,
    })
}
