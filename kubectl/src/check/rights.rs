//! Reads from the API server the user's rights for an installation, and the rights of the hub's account.

use futures::future::join_all;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec, SubjectAccessReview,
    SubjectAccessReviewSpec,
};
use krypton_types::names::HUB_LEASE;
use kube::Api;
use kube::api::PostParams;

use crate::explain::sources::{Lookup, lookup};
use crate::home::Connection;
use crate::program::Program;

const GROUP: &str = "mesh.openkcm.io";
const RBAC_GROUP: &str = "rbac.authorization.k8s.io";
const ADMISSION_GROUP: &str = "admissionregistration.k8s.io";

/// API groups and resources of the objects of both charts. The user who installs a chart creates them.
const CHART_RESOURCES: [(&str, &str); 10] = [
    ("", "namespaces"),
    ("", "secrets"),
    ("", "serviceaccounts"),
    ("", "services"),
    ("apps", "deployments"),
    ("apiextensions.k8s.io", "customresourcedefinitions"),
    (RBAC_GROUP, "clusterroles"),
    (RBAC_GROUP, "clusterrolebindings"),
    (RBAC_GROUP, "roles"),
    (RBAC_GROUP, "rolebindings"),
];

/// API groups and resources that only the hub's chart contains.
const HUB_CHART_RESOURCES: [(&str, &str); 3] = [
    ("", "configmaps"),
    (ADMISSION_GROUP, "validatingadmissionpolicies"),
    (ADMISSION_GROUP, "validatingadmissionpolicybindings"),
];

/// API groups and resources of a chart with default values.
fn chart_resources(program: Program) -> Vec<(&'static str, &'static str)> {
    let mut resources = CHART_RESOURCES.to_vec();
    if program == Program::Hub {
        resources.extend(HUB_CHART_RESOURCES);
    }
    resources
}

/// Returns each resource of a chart, and whether the user may create it.
pub(super) async fn of_user(
    cluster: &Connection,
    program: Program,
) -> Vec<(&'static str, Lookup<bool>)> {
    let reviews = chart_resources(program)
        .into_iter()
        .map(async |(group, resource)| (resource, may_create(cluster, group, resource).await));
    join_all(reviews).await
}

async fn may_create(cluster: &Connection, group: &str, resource: &str) -> Lookup<bool> {
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec {
            resource_attributes: Some(attributes("create", group, resource)),
            ..SelfSubjectAccessReviewSpec::default()
        },
        ..SelfSubjectAccessReview::default()
    };
    let reviews: Api<SelfSubjectAccessReview> = Api::all(cluster.client.clone());
    lookup(cluster, "create selfsubjectaccessreviews", async {
        let params = PostParams::default();
        let review = reviews.create(&params, &review).await?;
        Ok(review.status.is_some_and(|status| status.allowed))
    })
    .await
}

/// Returns the rights without which a hub in this namespace cannot work, and whether its account has them.
pub(super) async fn of_hub(
    home: &Connection,
    namespace: &str,
    account: &str,
) -> Vec<(String, Lookup<bool>)> {
    let reviews = hub_rights(namespace).into_iter().map(async |right| {
        let name = right_name(&right);
        (name, may_account(home, namespace, account, right).await)
    });
    join_all(reviews).await
}

/// No setting of the chart omits one of these rights.
fn hub_rights(namespace: &str) -> [ResourceAttributes; 6] {
    let status = |right| ResourceAttributes {
        subresource: Some("status".to_owned()),
        ..right
    };
    let in_namespace = |right| ResourceAttributes {
        namespace: Some(namespace.to_owned()),
        ..right
    };
    let lease = ResourceAttributes {
        name: Some(HUB_LEASE.to_owned()),
        ..attributes("update", "coordination.k8s.io", "leases")
    };
    [
        attributes("list", GROUP, "tenants"),
        status(attributes("patch", GROUP, "tenants")),
        attributes("patch", GROUP, "edgeclusters"),
        status(attributes("patch", GROUP, "edgeclusters")),
        in_namespace(attributes("list", "", "secrets")),
        in_namespace(lease),
    ]
}

pub(super) fn attributes(verb: &str, group: &str, resource: &str) -> ResourceAttributes {
    ResourceAttributes {
        group: Some(group.to_owned()),
        resource: Some(resource.to_owned()),
        verb: Some(verb.to_owned()),
        ..ResourceAttributes::default()
    }
}

/// Formats a right, as in `patch tenants/status`.
fn right_name(right: &ResourceAttributes) -> String {
    let text = |field: &Option<String>| field.clone().unwrap_or_default();
    let subresource = right.subresource.iter().map(|name| format!("/{name}"));
    let namespace = right
        .namespace
        .iter()
        .map(|name| format!(" in the namespace {name}"));
    let more: String = subresource.chain(namespace).collect();
    format!("{} {}{more}", text(&right.verb), text(&right.resource))
}

pub(super) async fn may_account(
    home: &Connection,
    namespace: &str,
    account: &str,
    right: ResourceAttributes,
) -> Lookup<bool> {
    let groups = [
        "system:authenticated".to_owned(),
        "system:serviceaccounts".to_owned(),
        format!("system:serviceaccounts:{namespace}"),
    ];
    let review = SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            groups: Some(groups.into()),
            resource_attributes: Some(right),
            user: Some(format!("system:serviceaccount:{namespace}:{account}")),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    };
    let reviews: Api<SubjectAccessReview> = Api::all(home.client.clone());
    lookup(home, "create subjectaccessreviews", async {
        let params = PostParams::default();
        let review = reviews.create(&params, &review).await?;
        Ok(review.status.is_some_and(|status| status.allowed))
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use kube::core::{ApiResource, GroupVersionKind};

    use super::*;

    /// Returns the groups and resources that the installation of a rendered chart creates.
    fn resources_in(manifest: &str) -> BTreeSet<(String, String)> {
        let installed = manifest
            .split("\n---\n")
            .filter(|document| !document.contains("helm.sh/hook: test"));
        let lines: Vec<&str> = installed.flat_map(str::lines).collect();
        let types = lines.windows(2).filter_map(|pair| {
            let version = pair[0].strip_prefix("apiVersion: ")?;
            Some((version, pair[1].strip_prefix("kind: ")?))
        });
        types
            .map(|(version, kind)| {
                let (group, version) = version.split_once('/').unwrap_or(("", version));
                let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
                (resource.group, resource.plural)
            })
            .collect()
    }

    #[test]
    fn rights_cover_each_kind_of_charts() {
        let charts = [
            (
                Program::Hub,
                include_str!("../../../tests/golden/krypton-hub/default.yaml"),
            ),
            (
                Program::Agent,
                include_str!("../../../tests/golden/krypton-agent/default.yaml"),
            ),
        ];
        for (program, manifest) in charts {
            let mut expected = resources_in(manifest);
            // Helm creates the namespace of the release, and stores the release in a Secret.
            for resource in ["namespaces", "secrets"] {
                expected.insert((String::new(), resource.to_owned()));
            }
            let reviewed = chart_resources(program).into_iter();
            let reviewed = reviewed.map(|(group, name)| (group.to_owned(), name.to_owned()));
            assert_eq!(reviewed.collect::<BTreeSet<_>>(), expected, "{program:?}");
        }
    }

    #[test]
    fn right_of_hub_is_named_with_its_scope() {
        let names = hub_rights("krypton").map(|right| right_name(&right));
        assert_eq!(names[1], "patch tenants/status");
        assert_eq!(names[4], "list secrets in the namespace krypton");
    }
}
