//! Resources of the built-in kinds, and the order in which Helm handles kinds.

use std::cmp::Ordering;

/// Kinds in the order of installation. Kinds outside this list follow, by name.
const INSTALL_ORDER: [&str; 38] = [
    "PriorityClass",
    "Namespace",
    "NetworkPolicy",
    "ResourceQuota",
    "LimitRange",
    "PodSecurityPolicy",
    "PodDisruptionBudget",
    "ServiceAccount",
    "Secret",
    "SecretList",
    "ConfigMap",
    "StorageClass",
    "PersistentVolume",
    "PersistentVolumeClaim",
    "CustomResourceDefinition",
    "ClusterRole",
    "ClusterRoleList",
    "ClusterRoleBinding",
    "ClusterRoleBindingList",
    "Role",
    "RoleList",
    "RoleBinding",
    "RoleBindingList",
    "Service",
    "DaemonSet",
    "Pod",
    "ReplicationController",
    "ReplicaSet",
    "Deployment",
    "HorizontalPodAutoscaler",
    "StatefulSet",
    "Job",
    "CronJob",
    "IngressClass",
    "Ingress",
    "APIService",
    "MutatingWebhookConfiguration",
    "ValidatingWebhookConfiguration",
];

/// Group, kind, resource, and whether its objects have a namespace.
const BUILT_IN: [(&str, &str, &str, bool); 31] = [
    ("", "Namespace", "namespaces", false),
    ("", "Node", "nodes", false),
    ("", "PersistentVolume", "persistentvolumes", false),
    ("", "ConfigMap", "configmaps", true),
    ("", "LimitRange", "limitranges", true),
    ("", "PersistentVolumeClaim", "persistentvolumeclaims", true),
    ("", "Pod", "pods", true),
    ("", "ReplicationController", "replicationcontrollers", true),
    ("", "ResourceQuota", "resourcequotas", true),
    ("", "Secret", "secrets", true),
    ("", "Service", "services", true),
    ("", "ServiceAccount", "serviceaccounts", true),
    ("apps", "DaemonSet", "daemonsets", true),
    ("apps", "Deployment", "deployments", true),
    ("apps", "ReplicaSet", "replicasets", true),
    ("apps", "StatefulSet", "statefulsets", true),
    (
        "autoscaling",
        "HorizontalPodAutoscaler",
        "horizontalpodautoscalers",
        true,
    ),
    ("batch", "CronJob", "cronjobs", true),
    ("batch", "Job", "jobs", true),
    ("networking.k8s.io", "Ingress", "ingresses", true),
    ("networking.k8s.io", "IngressClass", "ingressclasses", false),
    (
        "networking.k8s.io",
        "NetworkPolicy",
        "networkpolicies",
        true,
    ),
    (
        "policy",
        "PodDisruptionBudget",
        "poddisruptionbudgets",
        true,
    ),
    (
        "rbac.authorization.k8s.io",
        "ClusterRole",
        "clusterroles",
        false,
    ),
    (
        "rbac.authorization.k8s.io",
        "ClusterRoleBinding",
        "clusterrolebindings",
        false,
    ),
    ("rbac.authorization.k8s.io", "Role", "roles", true),
    (
        "rbac.authorization.k8s.io",
        "RoleBinding",
        "rolebindings",
        true,
    ),
    (
        "scheduling.k8s.io",
        "PriorityClass",
        "priorityclasses",
        false,
    ),
    ("storage.k8s.io", "StorageClass", "storageclasses", false),
    (
        "apiextensions.k8s.io",
        "CustomResourceDefinition",
        "customresourcedefinitions",
        false,
    ),
    ("coordination.k8s.io", "Lease", "leases", true),
];

/// Returns the resource of a built-in kind, and whether its objects have a namespace.
pub(crate) fn built_in(group: &str, kind: &str) -> Option<(&'static str, bool)> {
    let row = BUILT_IN
        .iter()
        .find(|row| (row.0, row.1) == (group, kind))?;
    Some((row.2, row.3))
}

/// Compares kinds for an installation.
pub(crate) fn install_order(one: &str, other: &str) -> Ordering {
    compare_by_rank(one, other, |position| position)
}

/// Compares kinds for an uninstallation. Unknown kinds also come last.
pub(crate) fn uninstall_order(one: &str, other: &str) -> Ordering {
    compare_by_rank(one, other, |position| INSTALL_ORDER.len() - position)
}

fn compare_by_rank(one: &str, other: &str, rank: impl Fn(usize) -> usize) -> Ordering {
    let position = |kind: &str| INSTALL_ORDER.iter().position(|known| *known == kind);
    match (position(one), position(other)) {
        (Some(one), Some(other)) => rank(one).cmp(&rank(other)),
        (Some(_), None) => Ordering::Less,
        (None, Some(_)) => Ordering::Greater,
        (None, None) => one.cmp(other),
    }
}
