//! Names that other programs must find again: releases, annotations, labels, finalizers.

use crate::fingerprint::sha256_hex;

/// Group of all our APIs, and prefix of all our annotations, labels and finalizers.
pub const GROUP: &str = "mesh.openkcm.io";
/// Finalizer on a Tenant.
pub const TENANT_FINALIZER: &str = "mesh.openkcm.io/cleanup";
/// Finalizer on a KryptonDeployment.
pub const DEPLOYMENT_FINALIZER: &str = "mesh.openkcm.io/kryptondeployment-finalizer";
/// Finalizer on an EdgeCluster whose deletion uninstalls the member's releases.
pub const UNINSTALL_FINALIZER: &str = "mesh.openkcm.io/uninstall";
/// Annotation, `"true"` while a Tenant's release is being removed.
pub const DELETING_ANNOTATION: &str = "mesh.openkcm.io/deleting";
/// Annotation, `"true"` stops all writes for a Tenant or an EdgeCluster.
pub const PAUSED_ANNOTATION: &str = "mesh.openkcm.io/paused";
/// Annotation by which a person hands a release to a Tenant or KryptonDeployment that did not make it, or
/// what is placed to a Tenant of home.
pub const ADOPT_ANNOTATION: &str = "mesh.openkcm.io/adopt";
/// Annotation on a Tenant, a `DriftMode` for its release in the place of the fleet's; on an object of a
/// release, `off` leaves it alone.
pub const DRIFT_ANNOTATION: &str = "mesh.openkcm.io/drift";
/// Annotation on a Tenant or on an object of its release: JSON pointers to what may differ.
pub const DRIFT_IGNORE_ANNOTATION: &str = "mesh.openkcm.io/drift-ignore";
/// Annotation on a Tenant, with any new value: try now what has failed, whatever pause was to come.
pub const RECONCILE_REQUESTED_ANNOTATION: &str = "mesh.openkcm.io/reconcile-requested-at";
/// Annotation, `"true"` lets a finalizer go and leaves the release where it is.
pub const ORPHAN_ANNOTATION: &str = "mesh.openkcm.io/orphan";
/// Label on what the hub has placed on a member, with the value [`MANAGED_BY_HUB`].
pub const MANAGED_BY_LABEL: &str = "mesh.openkcm.io/managed-by";
pub const MANAGED_BY_HUB: &str = "krypton-hub";
/// Annotation on such a Tenant: the UID of the one at home that it was made for.
pub const HOME_UID_ANNOTATION: &str = "mesh.openkcm.io/home-uid";
/// Finalizer on a Tenant of home that is placed on a member: that goes first.
pub const PLACED_FINALIZER: &str = "mesh.openkcm.io/placed";
/// Annotation on such a Tenant, written with the finalizer: the member.
pub const PLACED_ON_ANNOTATION: &str = "mesh.openkcm.io/placed-on";
/// Default of the label that makes a Secret a member; its value must be `"true"`.
pub const DISCOVERY_LABEL: &str = "sigs.k8s.io/multicluster-runtime-kubeconfig";
/// Default of the key under which such a Secret holds its kubeconfig.
pub const KUBECONFIG_KEY: &str = "kubeconfig";
/// Annotation on a Secret with a kubeconfig: the key that it is under.
pub const KUBECONFIG_KEY_ANNOTATION: &str = "mesh.openkcm.io/kubeconfig-key";
/// Annotation on the object that a member is found by: the member's name, when it is not the object's.
pub const MEMBER_NAME_ANNOTATION: &str = "mesh.openkcm.io/member-name";
/// Label on a Secret with a kubeconfig, `"true"`: KryptonDeployments of all namespaces may name it.
pub const OPEN_TO_DEPLOYMENTS_LABEL: &str = "mesh.openkcm.io/open-to-deployments";
/// Lease in the hub's namespace: which of several hubs leads.
pub const HUB_LEASE: &str = "krypton-hub";
/// Label with the value `true` on the pod of the hub that leads; the Service of agents selects by it.
pub const LEADER_LABEL: &str = "mesh.openkcm.io/leader";
/// Secret in the hub's namespace: the CA that signs the certificates of hub and agents.
pub const CA_SECRET: &str = "krypton-hub-ca";
/// ConfigMaps in the hub's namespace: the chart version that a range stands for, the epoch of the desired state, and
/// the members with their sources.
pub const CHART_CONFIG_MAP: &str = "krypton-hub-chart";
pub const EPOCH_CONFIG_MAP: &str = "krypton-hub-epoch";
pub const MEMBERS_CONFIG_MAP: &str = "krypton-hub-members";
/// The home cluster as a member.
pub const SELF_CLUSTER: &str = "self-cluster";

/// Helm's limit for release names.
pub const RELEASE_NAME_MAX: usize = 53;
/// The API's limit for the name part of a qualified name, and for a DNS label.
pub const LABEL_MAX: usize = 63;
/// The API's limit for object names.
pub const SUBDOMAIN_MAX: usize = 253;

const KEPT_CHARACTERS: usize = 40;
const DIGEST_CHARACTERS: usize = 12;

/// The release of a Tenant on a member, at most [`RELEASE_NAME_MAX`] bytes.
pub fn tenant_release(tenant: &str, cluster: &str) -> String {
    within(RELEASE_NAME_MAX, format!("tenant-{tenant}-{cluster}"))
}

/// The release of a KryptonDeployment, at most [`RELEASE_NAME_MAX`] bytes.
pub fn deployment_release(name: &str) -> String {
    within(RELEASE_NAME_MAX, format!("ced-{name}"))
}

/// The annotation of a Tenant that holds the fingerprint of what a member has installed for it.
pub fn fingerprint_annotation(cluster: &str) -> String {
    format!(
        "{GROUP}/{}",
        within(LABEL_MAX, format!("fingerprint-{cluster}"))
    )
}

/// Whether `name` is an RFC 1123 label: a legal namespace name.
pub fn is_dns_label(name: &str) -> bool {
    name.len() <= LABEL_MAX && is_label_shaped(name)
}

/// A namespace as a person gives it; the error says how to write it.
pub fn namespace_name(text: &str) -> Result<String, &'static str> {
    match is_dns_label(text) {
        true => Ok(text.to_owned()),
        false => Err("write lower-case letters, digits and '-', at most 63 characters"),
    }
}

/// Whether `name` is an RFC 1123 subdomain: a legal name of most objects. Unlike a host name's,
/// its labels have no limit of their own.
pub fn is_dns_subdomain(name: &str) -> bool {
    name.len() <= SUBDOMAIN_MAX && name.split('.').all(is_label_shaped)
}

fn is_label_shaped(label: &str) -> bool {
    let alphanumeric = |byte: Option<&u8>| {
        byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
    };
    let bytes = label.as_bytes();
    alphanumeric(bytes.first())
        && alphanumeric(bytes.last())
        && bytes
            .iter()
            .all(|byte| *byte == b'-' || alphanumeric(Some(byte)))
}

/// Shortens a name over the limit as Flux does, and cuts no separator in half.
fn within(limit: usize, name: String) -> String {
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

    /// A name that the apiserver admits for a Tenant or a Secret.
    fn object_name() -> impl Strategy<Value = String> {
        let label = "[a-z0-9]([-a-z0-9]{0,60}[a-z0-9])?";
        proptest::collection::vec(label, 1..4).prop_map(|labels| labels.join("."))
    }

    fn is_qualified_name_part(name: &str) -> bool {
        let inner = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        name.len() <= 63
            && name.chars().all(inner)
            && name.starts_with(|c: char| c.is_ascii_alphanumeric())
            && name.ends_with(|c: char| c.is_ascii_alphanumeric())
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
    fn dns_names_are_told_from_others() {
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
            let whole = format!("tenant-{tenant}-{cluster}");
            let release = tenant_release(&tenant, &cluster);
            prop_assert!(release.len() <= RELEASE_NAME_MAX);
            prop_assert!(is_dns_subdomain(&release), "{}", release);
            prop_assert_eq!(&release, &tenant_release(&tenant, &cluster));
            if whole.len() <= RELEASE_NAME_MAX {
                prop_assert_eq!(release, whole);
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
            prop_assert!(is_qualified_name_part(name), "{}", name);
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
