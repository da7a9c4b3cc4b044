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
use crate::explain::sources::{Answer, ask, lead};
use crate::home::{Connection, Env, HomeArgs, connect, search};
use crate::join_info;
use crate::kind::Kind;
use crate::objects::Scope;
use crate::render::{Output, Printed, encode};
use crate::statement::{self, Format, Line, Mark};

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
    output: Option<Format>,
    #[command(flatten)]
    home: HomeArgs,
}

/// API groups and resources of the charts' objects. The user who installs the charts creates them.
const CONTENTS: [(&str, &str); 9] = [
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
    env: Env<'_>,
    now: Timestamp,
) -> Result<Printed, KubectlError> {
    let home = connect(&args.home, env).await?;
    let version = ask("get /version", home.client.apiserver_version()).await;
    let mut lines = vec![findings::kubernetes(&version)];
    // All other requests would fail for the same reason.
    if !matches!(version, Answer::Failed(_)) {
        lines.extend(match args.pre {
            true => before_installation(&home).await,
            false => installed(&home, args.namespace.as_deref(), now).await,
        });
    }
    let is_defect = |line: &Line| matches!(line.mark, Mark::Wrong | Mark::NotKnown);
    let has_failed = lines.iter().any(is_defect);
    let printed = Printed::stdout(match args.output {
        Some(Format::Json) => {
            let value = json!({"passed": !has_failed, "lines": statement::as_json(&lines)});
            encode(Output::Json, &value)?
        }
        None => statement::text(&lines),
    });
    match has_failed {
        true => Err(KubectlError::ChecksFailed { printed }),
        false => Ok(printed),
    }
}

async fn before_installation(cluster: &Connection) -> Vec<Line> {
    let rights = CONTENTS
        .map(async |(group, resource)| (resource, may_create(cluster, group, resource).await));
    let (crds, rights) = Box::pin(futures::future::join(crds(cluster), join_all(rights))).await;
    let mut lines = vec![findings::rights(&rights)];
    lines.extend(findings::crds_of_original(&crds));
    lines
}

async fn installed(home: &Connection, namespace: Option<&str>, now: Timestamp) -> Vec<Line> {
    let namespaces = home.hub_namespaces(namespace);
    let info = search(&namespaces, async |namespace| {
        join_info::read(home, namespace).await
    });
    let members = home.untyped(Kind::Cluster.resource(), &Scope::All);
    let (crds, (lead, searched), info, members) = Box::pin(async {
        tokio::join!(
            crds(home),
            lead(namespace, home),
            info,
            members.values(None)
        )
    })
    .await;
    let mut lines = findings::crds(&crds);
    lines.extend(findings::leader(&lead, &searched, now));
    let hub_version = info.ok().flatten().map(|(_, info)| info.version);
    lines.extend(hub_version.as_deref().map(findings::hub_version));
    lines.extend(findings::members(&members, hub_version.as_deref(), now));
    lines
}

/// The CRDs of Krypton by name.
async fn crds(cluster: &Connection) -> Vec<(String, Answer<CustomResourceDefinition>)> {
    let api: Api<CustomResourceDefinition> = Api::all(cluster.client.clone());
    let asked = krypton_crds::all().into_iter().map(async |crd| {
        let name = crd.name_any();
        let found = ask("get customresourcedefinitions", api.get(&name)).await;
        (name, found)
    });
    join_all(asked).await
}

async fn may_create(cluster: &Connection, group: &str, resource: &str) -> Answer<bool> {
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
    ask("create selfsubjectaccessreviews", async {
        let params = PostParams::default();
        let reviewed = reviews.create(&params, &review).await?;
        Ok(reviewed.status.is_some_and(|status| status.allowed))
    })
    .await
}
