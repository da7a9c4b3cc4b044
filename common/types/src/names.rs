//! Names that other programs depend on: releases, annotations, labels, finalizers.

use crate::fingerprint::sha256_hex;

/// API group, and prefix of all annotations, labels and finalizers of Krypton.
pub const GROUP: &str = "mesh.openkcm.io";
/// Finalizer on a Tenant.
pub const TENANT_FINALIZER: &str = "mesh.openkcm.io/cleanup";
/// Finalizer on a KryptonDeployment.
pub const DEPLOYMENT_FINALIZER: &str = "mesh.openkcm.io/kryptondeployment-finalizer";
/// Finalizer on an EdgeCluster whose deletion uninstalls the member's releases.
pub const UNINSTALL_FINALIZER: &str = "mesh.openkcm.io/uninstall";
/// Annotation. `"true"` while Krypton uninstalls a Tenant's release.
pub const DELETING_ANNOTATION: &str = "mesh.openkcm.io/deleting";
/// Annotation. `"true"` suspends all writes for a Tenant or an EdgeCluster.
pub const PAUSED_ANNOTATION: &str = "mesh.openkcm.io/paused";
/// Annotation through which a user lets a Tenant or KryptonDeployment adopt a release that it did not create. On a
/// Tenant of the home cluster, it also allows the adoption of a Tenant on the member.
pub const ADOPT_ANNOTATION: &str = "mesh.openkcm.io/adopt";
/// Annotation on a Tenant: a `DriftMode` for its release, which overrides the fleet's. On an object of a release,
/// `off` disables drift detection for that object.
pub const DRIFT_ANNOTATION: &str = "mesh.openkcm.io/drift";
/// Annotation on a Tenant or on an object of its release: JSON pointers to fields that may differ.
pub const DRIFT_IGNORE_ANNOTATION: &str = "mesh.openkcm.io/drift-ignore";
/// Annotation on a Tenant. A new value retries a failed action immediately, without waiting for the back-off. The
/// status acknowledges it in `lastHandledReconcileAt`.
pub const RECONCILE_REQUESTED_ANNOTATION: &str = "mesh.openkcm.io/reconcile-requested-at";
/// Annotation. `"true"` removes the finalizer and keeps the release.
pub const ORPHAN_ANNOTATION: &str = "mesh.openkcm.io/orphan";
/// Label on objects that the hub has placed on a member, with the value [`MANAGED_BY_HUB`].
pub const MANAGED_BY_LABEL: &str = "mesh.openkcm.io/managed-by";
pub const MANAGED_BY_HUB: &str = "krypton-hub";
/// Annotation on a placed Tenant: UID of the Tenant on the home cluster that it was created for.
pub const HOME_UID_ANNOTATION: &str = "mesh.openkcm.io/home-uid";
/// Finalizer on a Tenant of the home cluster that is placed on a member. The Tenant on the member is deleted first.
pub const PLACED_FINALIZER: &str = "mesh.openkcm.io/placed";
/// Annotation on a Tenant of the home cluster, written together with the finalizer: name of the member.
pub const PLACED_ON_ANNOTATION: &str = "mesh.openkcm.io/placed-on";
/// Default label of Secrets that declare a member. Its value must be `"true"`.
pub const DISCOVERY_LABEL: &str = "sigs.k8s.io/multicluster-runtime-kubeconfig";
/// Default key of the kubeconfig in such a Secret.
pub const KUBECONFIG_KEY: &str = "kubeconfig";
/// Annotation on a Secret with a kubeconfig: key of the kubeconfig.
pub const KUBECONFIG_KEY_ANNOTATION: &str = "mesh.openkcm.io/kubeconfig-key";
/// Annotation on the object that declares a member: the member's name, if it differs from the object's name.
pub const MEMBER_NAME_ANNOTATION: &str = "mesh.openkcm.io/member-name";
/// Label on a Secret with a kubeconfig. With `"true"`, KryptonDeployments in all namespaces may refer to it.
pub const OPEN_TO_DEPLOYMENTS_LABEL: &str = "mesh.openkcm.io/open-to-deployments";
/// Field managers of the hub and of the agent: the part of their user agents before `/`.
pub const HUB_MANAGER: &str = "krypton-hub";
pub const AGENT_MANAGER: &str = "krypton-agent";
/// Lease in the hub's namespace for the leader election among hubs.
pub const HUB_LEASE: &str = "krypton-hub";
/// Label with the value `true` on the leader's pod. The Service for agents selects by it.
pub const LEADER_LABEL: &str = "mesh.openkcm.io/leader";
/// Secret in the hub's namespace with the CA that signs the certificates of hub and agents.
pub const CA_SECRET: &str = "krypton-hub-ca";
/// ConfigMaps in the hub's namespace. They contain the chart version that a range resolves to, the epoch of the
/// desired state, and the members with their sources.
pub const CHART_CONFIG_MAP: &str = "krypton-hub-chart";
pub const EPOCH_CONFIG_MAP: &str = "krypton-hub-epoch";
pub const MEMBERS_CONFIG_MAP: &str = "krypton-hub-members";
/// Name of the home cluster as a member.
pub const SELF_CLUSTER: &str = "self-cluster";

/// Helm's limit for release names.
pub const RELEASE_NAME_MAX: usize = 53;
/// The API's limit for the name part of a qualified name, and for a DNS label.
pub const LABEL_MAX: usize = 63;
/// The API's limit for object names.
pub const SUBDOMAIN_MAX: usize = 253;

const KEPT_CHARACTERS: usize = 40;
const DIGEST_CHARACTERS: usize = 12;

/// Returns the release name of a Tenant on a member, at most [`RELEASE_NAME_MAX`] bytes.
pub fn tenant_release(tenant: &str, cluster: &str) -> String {
    shorten(RELEASE_NAME_MAX, format!("tenant-{tenant}-{cluster}"))
}

/// Returns the release name of a KryptonDeployment, at most [`RELEASE_NAME_MAX`] bytes.
pub fn deployment_release(name: &str) -> String {
    shorten(RELEASE_NAME_MAX, format!("ced-{name}"))
}

/// Returns the annotation on a Tenant with the fingerprint of its release on a member.
pub fn fingerprint_annotation(cluster: &str) -> String {
    format!(
        "{GROUP}/{}",
        shorten(LABEL_MAX, format!("fingerprint-{cluster}"))
    )
}

/// Returns whether `name` is an RFC 1123 label, which is a legal namespace name.
pub fn is_dns_label(name: &str) -> bool {
    name.len() <= LABEL_MAX && is_label_shaped(name)
}

/// Checks a namespace that a user has entered.
///
/// # Errors
/// The rule for namespace names.
pub fn namespace_name(text: &str) -> Result<String, &'static str> {
    match is_dns_label(text) {
        true => Ok(text.to_owned()),
        false => Err("write lower-case letters, digits and '-', at most 63 characters"),
    }
}

/// Returns whether `name` is an RFC 1123 subdomain, which is a legal name of most objects. Unlike labels of a host
/// name, its labels have no length limit.
pub fn is_dns_subdomain(name: &str) -> bool {
    name.len() <= SUBDOMAIN_MAX && name.split('.').all(is_label_shaped)
}

/// Returns whether a ConfigMap or Secret may have this key.
pub fn is_data_key(key: &str) -> bool {
    let is_legal = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    !key.is_empty() && key.len() <= SUBDOMAIN_MAX && key.bytes().all(is_legal)
}

fn is_label_shaped(label: &str) -> bool {
    let outer = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    is_name_shaped(label, outer, b"-")
}

/// Returns whether a label or annotation key is valid: a name of at most 63 bytes, optionally after a DNS subdomain.
pub fn is_qualified_name(key: &str) -> bool {
    match key.split_once('/') {
        Some((prefix, name)) => is_dns_subdomain(prefix) && is_name_part(name),
        None => is_name_part(key),
    }
}

/// Returns whether the value of a label is valid.
pub(crate) fn is_label_value(value: &str) -> bool {
    value.is_empty() || is_name_part(value)
}

fn is_name_part(text: &str) -> bool {
    text.len() <= LABEL_MAX && is_name_shaped(text, u8::is_ascii_alphanumeric, b"-_.")
}

/// Returns whether the first and last byte are `outer`, and all others `outer` or in `inner`.
fn is_name_shaped(text: &str, outer: fn(&u8) -> bool, inner: &[u8]) -> bool {
    let bytes = text.as_bytes();
    bytes.first().is_some_and(outer)
        && bytes.last().is_some_and(outer)
        && bytes.iter().all(|byte| outer(byte) || inner.contains(byte))
}

/// Shortens a name over the limit in the same way as Flux, and leaves no separator before the digest.
fn shorten(limit: usize, name: String) -> String {
    if name.len() <= limit {
        return name;
    }
    let head: String = name.chars().take(KEPT_CHARACTERS).collect();
    let mut digest = sha256_hex(name.as_bytes());
    digest.truncate(DIGEST_CHARACTERS);
    format!("{}-{digest}", head.trim_end_matches(['.', '-']))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// A name that the API server admits for a Tenant or a Secret.
    fn object_name() -> impl Strategy<Value = String> {
        let label = "[a-z0-9]([-a-z0-9]{0,60}[a-z0-9])?";
        proptest::collection::vec(label, 1..4).prop_map(|labels| labels.join("."))
    }

    #[test]
    fn names_of_the_original_stay_as_they_were() {
        assert_eq!(
            tenant_release("e2e-acme", "demo-remote-1"),
            "tenant-e2e-acme-demo-remote-1"
        );
        assert_eq!(deployment_release("acme"), "ced-acme");
        assert_eq!(
            fingerprint_annotation("edge-1"),
            "mesh.openkcm.io/fingerprint-edge-1"
        );
    }

    #[test]
    fn overlong_name_is_cut_and_gets_digest_suffix() {
        let exact = tenant_release(&"a".repeat(30), &"b".repeat(15));
        assert_eq!(exact.len(), 53);
        assert!(exact.ends_with('b'), "{exact}");

        // printf 'ced-%s' "$(printf 'a%.0s' $(seq 50))" | sha256sum
        assert_eq!(
            deployment_release(&"a".repeat(50)),
            "ced-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-a52efd01b5a6"
        );
    }

    #[test]
    fn cut_name_has_no_separator_before_digest() {
        let name = format!("{}.--.{}", "a".repeat(32), "b".repeat(30));
        let release = deployment_release(&name);
        assert!(
            release.starts_with(&format!("ced-{}-", "a".repeat(32))),
            "{release}"
        );
        assert_eq!(release.len(), 4 + 32 + 1 + 12);
    }

    #[test]
    fn annotation_limit_includes_prefix_of_name_part() {
        let longest = fingerprint_annotation(&"c".repeat(51));
        assert!(longest.ends_with(&"c".repeat(51)));
        let cut = fingerprint_annotation(&"c".repeat(52));
        let (group, name) = cut.split_once('/').unwrap();
        assert_eq!(group, "mesh.openkcm.io");
        assert_eq!(name.len(), 53);
    }

    #[test]
    fn dns_names_are_recognized() {
        for label in ["a", "0", "a-b", "a--b", &"a".repeat(63)] {
            assert!(is_dns_label(label), "{label}");
            assert!(is_dns_subdomain(label), "{label}");
        }
        for bad in [
            "",
            "-a",
            "a-",
            "A",
            "a_b",
            "ä",
            "a b",
            "a\n",
            "../a",
            "--flag",
            &"a".repeat(254),
        ] {
            assert!(!is_dns_label(bad), "{bad}");
            assert!(!is_dns_subdomain(bad), "{bad}");
        }
        for subdomain in ["a.b", "a-b.c-d.e", &"a".repeat(253)] {
            assert!(!is_dns_label(subdomain), "{subdomain}");
            assert!(is_dns_subdomain(subdomain), "{subdomain}");
        }
        for bad in [".", "a.", ".a", "a..b", "a.-b", "a-.b"] {
            assert!(!is_dns_subdomain(bad), "{bad}");
        }
    }

    #[test]
    fn long_names_with_common_prefix_stay_distinct() {
        let head = "x".repeat(60);
        let releases: BTreeSet<String> = (0..1000)
            .map(|i| tenant_release(&format!("{head}{i}"), "edge-1"))
            .collect();
        assert_eq!(releases.len(), 1000);
    }

    proptest! {
        #[test]
        fn release_name_is_legal_and_unchanged_within_limit(
            tenant in object_name(), cluster in object_name(),
        ) {
            let full_name = format!("tenant-{tenant}-{cluster}");
            let release = tenant_release(&tenant, &cluster);
            prop_assert!(release.len() <= RELEASE_NAME_MAX);
            prop_assert!(is_dns_subdomain(&release), "{}", release);
            prop_assert_eq!(&release, &tenant_release(&tenant, &cluster));
            if full_name.len() <= RELEASE_NAME_MAX {
                prop_assert_eq!(release, full_name);
            }
        }

        #[test]
        fn a_deployments_release_is_a_legal_helm_name(name in object_name()) {
            let release = deployment_release(&name);
            prop_assert!(release.len() <= RELEASE_NAME_MAX);
            prop_assert!(is_dns_subdomain(&release), "{}", release);
        }

        #[test]
        fn the_annotation_is_a_legal_key(cluster in object_name()) {
            let key = fingerprint_annotation(&cluster);
            let name = key.strip_prefix("mesh.openkcm.io/").unwrap();
            prop_assert!(is_qualified_name(&key), "{}", key);
            if cluster.len() <= 51 {
                prop_assert_eq!(name, format!("fingerprint-{cluster}"));
            }
        }

        #[test]
        fn distinct_long_names_do_not_collide(a in object_name(), b in object_name()) {
            let (a, b) = (format!("{a}.{}", "z".repeat(50)), format!("{b}.{}", "z".repeat(50)));
            prop_assume!(a != b);
            prop_assert_ne!(deployment_release(&a), deployment_release(&b));
            prop_assert_ne!(fingerprint_annotation(&a), fingerprint_annotation(&b));
        }

        #[test]
        fn any_text_gives_a_name_within_the_limit(tenant in ".{0,300}", cluster in ".{0,300}") {
            let limit = RELEASE_NAME_MAX.max(KEPT_CHARACTERS * 4 + 1 + DIGEST_CHARACTERS);
            prop_assert!(tenant_release(&tenant, &cluster).len() <= limit);
        }
    }
}
