//! Maps the reason of a condition to an action that the user can take.

use krypton_types::conditions::{WAITING, reason};

/// For a Tenant's conditions on one member. `None` if no action is needed or the message contains it.
pub(super) fn for_tenant(reason: &str) -> Option<&'static str> {
    Some(match reason {
        reason::CHART_NOT_LOADED => {
            "check that the hub can reach the repository with its credentials; installed workloads keep running"
        }
        reason::VERSION_NOT_FOUND | reason::VERSION_INVALID => {
            "correct chart.version of the hub's chart; without the chart, correct --chart-version and restart the hub"
        }
        reason::INSTALL_FAILED | reason::UPGRADE_FAILED => {
            "correct the chart or its values; the workload or Helm's message above shows which"
        }
        reason::ROLLBACK_FAILED => "check the release there with helm history",
        reason::UNINSTALL_FAILED => {
            "see Helm's message; the annotation mesh.openkcm.io/orphan=true deletes the Tenant and keeps the release"
        }
        reason::HELM_UNAVAILABLE => "it continues within 30 seconds after helm can start there",
        reason::REQUEST_REFUSED => {
            "correct the right, admission policy or schema that the message names on that cluster; kubectl krypton resync skips the back-off"
        }
        reason::SUSPENDED => "nothing: it continues when the cluster accepts writes again",
        reason::NOT_READY => {
            "look at the workload that the message names and at its pods, with kubectl describe on that cluster"
        }
        reason::RELEASE_IN_USE => {
            "annotate with mesh.openkcm.io/adopt=true if the message offers it; otherwise delete the Tenant, which keeps the other release, and recreate it with another spec.workspace"
        }
        reason::RELEASE_TAMPERED => {
            "compare the Secret with the chart; delete it to render the chart again, or run kubectl krypton accept-release"
        }
        reason::NAMESPACE_NOT_OWNED => {
            "delete the Tenant, and recreate it with another spec.workspace"
        }
        reason::WORKSPACE_INVALID => "set spec.workspace to a valid name of a namespace",
        reason::WORKSPACE_TERMINATING => {
            "it continues when the namespace is gone; look for finalizers in it"
        }
        reason::VALUES_NOT_ALLOWED => "remove spec.values, or start the hub with --tenant-values",
        reason::VALUES_TOO_LARGE => "shorten spec.values",
        reason::NOT_THIS_CLUSTER => {
            "create it on the member that spec.clusterRef names, remove clusterRef, or let the hub place it (--place-tenants)"
        }
        reason::NAMESPACE_NOT_ALLOWED => {
            "add the namespace to spec.allowedNamespaces of the EdgeCluster, or name another member"
        }
        reason::CLUSTER_NOT_FOUND => {
            "correct spec.clusterRef, or add the cluster; kubectl krypton get clusters lists them"
        }
        reason::CLUSTER_REF_CHANGED => {
            "restore spec.clusterRef; to move the Tenant, delete it, which uninstalls it unless it has the annotation mesh.openkcm.io/orphan=true, and recreate it"
        }
        reason::ALREADY_THERE => {
            "it is shown and not changed; if you delete the Tenant on the member, the hub places this one; the deletion uninstalls the release unless that Tenant has the annotation mesh.openkcm.io/orphan=true"
        }
        reason::BELONGS_TO_ANOTHER => {
            "to adopt it, set annotation mesh.openkcm.io/adopt=true on the Tenant on the home cluster"
        }
        reason::NOT_PLACING => "start the hub with --place-tenants",
        _ => return None,
    })
}

/// For the message of a release whose workloads may not be ready yet.
pub(super) fn for_waiting(message: &str) -> Option<&'static str> {
    let remedy = for_tenant(reason::NOT_READY);
    remedy.filter(|_| message.contains(WAITING))
}

/// For the conditions of an EdgeCluster.
pub(super) fn for_member(reason: &str) -> Option<&'static str> {
    Some(match reason {
        reason::AGENT_AWAY => {
            "look at the agent's log, and at its network connection to the hub; it keeps its last desired state"
        }
        reason::UNREACHABLE => {
            "check that its API server responds and accepts these credentials; the hub retries automatically"
        }
        reason::KUBECONFIG_INVALID | reason::CLIENT_FAILED => {
            "correct the kubeconfig in its Secret"
        }
        reason::SOURCE_GONE => {
            "label its Secret again, or run kubectl krypton leave NAME --orphan, which keeps its releases"
        }
        reason::DUPLICATE => "remove one of the two members from the fleet",
        reason::RENAMED => {
            "rename the Secret back, or run kubectl krypton leave NAME --orphan for the old name: its releases keep their names, and the new name installs all of them again"
        }
        reason::IDENTITY_CHANGED => {
            "correct the kubeconfig; if the cluster was rebuilt: kubectl krypton join NAME --replace"
        }
        reason::BANNED => "kubectl krypton unban reverts this",
        reason::OBSERVING => {
            "another process holds its Lease and reconciles it: if that is its agent, check its network connection to the hub"
        }
        reason::SUSPENDED => "nothing: it continues when that is over",
        reason::VALUES_MISSING
        | reason::VALUES_INVALID
        | reason::VALUES_TOO_LARGE
        | reason::NAMESPACES_INVALID => {
            "correct the field that the message names; the last valid state stays"
        }
        reason::CLOCK_DIFFERS => {
            "restart the agent after that: the hub compares the clocks when it connects"
        }
        _ => return None,
    })
}
