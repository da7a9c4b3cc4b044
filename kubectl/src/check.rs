//! `kubectl krypton check`: checks the home cluster, the hub and each member, or whether Krypton can be installed.

mod findings;

use clap::Args;
use futures::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_types::names::namespace_name;
use kube::api::PostParams;
use kube::{Api, ResourceExt as _};
use serde_json::json;

use crate::error::KubectlError;
use crate::explain::sources::{Lookup, leader_lease, lookup};
use crate::home::{Connection, Target, search};
use crate::join_info;
use crate::kind::Kind;
use crate::objects::Scope;
use crate::render::{CommandOutput, OutputFormat, encode};
use crate::statement::{self, Line, Mark, StatementFormat};

#[derive(Clone, Debug, Args)]
pub(super) struct Check {
    /// Check before an installation: the version of Kubernetes, your rights, and CRDs that exist already
    #[arg(long)]
    pre: bool,
    /// Namespace of the hub; by default krypton-system, else krypton, else that of the context
    #[arg(short, long, value_name = "NAMESPACE", value_parser = namespace_name, conflicts_with = "pre")]
    namespace: Option<String>,
    /// Output for programs
    #[arg(short, long, value_name = "FORMAT")]
    output: Option<StatementFormat>,
}

/// API groups and resources of the charts' objects. The user who installs the charts creates them.
const CHART_RESOURCES: [(&str, &str); 9] = [
    ("", "namespaces"),
    ("", "secrets"),
    ("", "serviceaccounts"),
    ("", "services"),
    ("apps", "deployments"),
    ("apiextensions.k8s.io", "customresourcedefinitions"),
    ("rbac.authorization.k8s.io", "clusterroles"),
    ("rbac.authorization.k8s.io", "clusterrolebindings"),
    ("rbac.authorization.k8s.io", "rolebindings"),
];

pub(super) async fn run(
    args: Check,
    target: &Target<'_>,
    now: Timestamp,
) -> Result<CommandOutput, KubectlError> {
    let cluster = target.connect().await?;
    let lines = match args.pre {
        true => check_before_installation(&cluster).await,
        false => check_installation(&cluster, args.namespace.as_deref(), now).await,
    };
    let has_failed = has_failed(&lines);
    let output = CommandOutput::stdout(match args.output {
        Some(StatementFormat::Json) => {
            let value = json!({"passed": !has_failed, "lines": statement::to_json(&lines)});
            encode(OutputFormat::Json, &value)?
        }
        None => statement::to_text(&lines),
    });
    match has_failed {
        true => Err(KubectlError::ChecksFailed { output }),
        false => Ok(output),
    }
}

/// Returns whether a line reports a defect, or that something is unknown.
fn has_failed(lines: &[Line]) -> bool {
    let is_defect = |line: &Line| matches!(line.mark, Mark::Problem | Mark::Unknown);
    lines.iter().any(is_defect)
}

/// Fails with the lines if the charts cannot be installed on a cluster.
pub(crate) async fn ensure_installable(cluster: &Connection) -> Result<(), KubectlError> {
    let lines = check_before_installation(cluster).await;
    match has_failed(&lines) {
        true => Err(KubectlError::ChecksFailed {
            output: CommandOutput {
                stdout: statement::to_text(&lines),
                stderr: format!(
                    "nothing was installed on the cluster {:?}\n",
                    cluster.context
                ),
            },
        }),
        false => Ok(()),
    }
}

/// Whether the charts can be installed on a cluster.
async fn check_before_installation(cluster: &Connection) -> Vec<Line> {
    check_cluster(cluster, async {
        let rights = CHART_RESOURCES
            .map(async |(group, resource)| (resource, may_create(cluster, group, resource).await));
        let (crds, rights) =
            Box::pin(futures::future::join(read_crds(cluster), join_all(rights))).await;
        let mut lines = vec![findings::rights(&rights)];
        lines.extend(findings::crds_of_original(&crds));
        lines
    })
    .await
}

async fn check_installation(
    home: &Connection,
    namespace: Option<&str>,
    now: Timestamp,
) -> Vec<Line> {
    let namespaces = home.hub_namespaces(namespace);
    let info = search(&namespaces, async |namespace| {
        join_info::read(home, namespace).await
    });
    let members = home.untyped(Kind::Cluster.resource(), &Scope::All);
    check_cluster(home, async {
        let (crds, (lease, searched_namespaces), info, members) = Box::pin(async {
            tokio::join!(
                read_crds(home),
                leader_lease(namespace, home),
                info,
                members.list_values()
            )
        })
        .await;
        let mut lines = findings::crds(&crds);
        lines.extend(findings::leader(&lease, &searched_namespaces, now));
        let hub_version = info.ok().flatten().map(|(_, info)| info.version);
        lines.extend(hub_version.as_deref().map(findings::hub_version));
        lines.extend(findings::members(&members, hub_version.as_deref(), now));
        lines
    })
    .await
}

/// Adds the version of Kubernetes to the other lines. If the API server does not respond, omits them: they would all
/// fail for the same reason.
async fn check_cluster(
    cluster: &Connection,
    other_checks: impl Future<Output = Vec<Line>>,
) -> Vec<Line> {
    let version = lookup("get /version", cluster.client.apiserver_version()).await;
    let mut lines = vec![findings::kubernetes(&version)];
    if !matches!(version, Lookup::Failed(_)) {
        lines.extend(Box::pin(other_checks).await);
    }
    lines
}

/// The CRDs of Krypton by name.
async fn read_crds(cluster: &Connection) -> Vec<(String, Lookup<CustomResourceDefinition>)> {
    let api: Api<CustomResourceDefinition> = Api::all(cluster.client.clone());
    let lookups = krypton_crds::all().into_iter().map(async |crd| {
        let name = crd.name_any();
        let crd_lookup = lookup("get customresourcedefinitions", api.get(&name)).await;
        (name, crd_lookup)
    });
    join_all(lookups).await
}

async fn may_create(cluster: &Connection, group: &str, resource: &str) -> Lookup<bool> {
    let attributes = ResourceAttributes {
        group: Some(group.to_owned()),
        resource: Some(resource.to_owned()),
        verb: Some("create".to_owned()),
        ..ResourceAttributes::default()
    };
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec {
            resource_attributes: Some(attributes),
            ..SelfSubjectAccessReviewSpec::default()
        },
        ..SelfSubjectAccessReview::default()
    };
    let reviews: Api<SelfSubjectAccessReview> = Api::all(cluster.client.clone());
    lookup("create selfsubjectaccessreviews", async {
        let params = PostParams::default();
        let review = reviews.create(&params, &review).await?;
        Ok(review.status.is_some_and(|status| status.allowed))
    })
    .await
}
