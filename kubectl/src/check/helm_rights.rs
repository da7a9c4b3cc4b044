//! Checks whether Helm's account has the rights for a rendered chart.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use futures::stream::{self, StreamExt as _};
use k8s_openapi::api::authorization::v1::ResourceAttributes;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::APIResourceList;
use krypton_runtime::access::ServiceAccount;
use serde_json::Value;

use super::account_of;
use super::findings::unknown_line;
use super::manifest::{KindName, Manifest, Requirements, Right, ServedKind, ServedKinds};
use super::rights::{attributes, may_account};
use crate::explain::sources::{Lookup, lookup};
use crate::home::{Connection, search};
use crate::program::{Program, pods_of, setting};
use crate::statement::{Line, Mark, NextStep};

/// Reviews of one check.
const MAX_REVIEWS: usize = 200;
const MAX_CONCURRENT_REQUESTS: usize = 16;

/// The flag of agent and hub that names Helm's account, and the environment variable that can replace it.
const ACCOUNT_SETTING: (&str, &str) = ("--helm-service-account", "KRYPTON_HELM_SERVICE_ACCOUNT");
/// Helm's account in the agent's chart with default values, in the namespace of the agent.
const AGENT_CHART_ACCOUNT: &str = "krypton-agent-helm";
const NO_ACCOUNT: NextStep<'static> = (
    "name the account with --account NAMESPACE:NAME",
    HELM_RIGHTS_DOCS,
);
const MISSING_RIGHTS: NextStep<'static> = (
    "add these rights to a role of the account",
    HELM_RIGHTS_DOCS,
);
const RIGHTS_FROM_CHART: NextStep<'static> = (
    "the agent's chart binds the account to cluster-admin; if you set helmRights.clusterRole, add these rights to that role",
    HELM_RIGHTS_DOCS,
);
const UNSERVED_KINDS: NextStep<'static> = (
    "install their CRDs, or render the chart with --include-crds",
    LIMITS_DOCS,
);
const LARGE_MANIFEST: NextStep<'static> = (
    "split the file, and keep each CRD with its objects",
    LIMITS_DOCS,
);

/// Describes the rights that Helm needs.
const HELM_RIGHTS_DOCS: &str = "how-to/restrict-helm.md#check-the-rights";
/// Describes the limits of this check.
const LIMITS_DOCS: &str = "reference/kubectl/check.md#rights-for-a-rendered-chart";

/// The account that Helm acts as.
struct HelmAccount {
    account: ServiceAccount,
    /// Whether neither agent nor hub runs, and this is the account of the agent's chart.
    is_default: bool,
}

impl HelmAccount {
    fn known(account: ServiceAccount) -> Self {
        Self {
            account,
            is_default: false,
        }
    }

    /// Returns the account of the agent's chart, before its installation.
    fn of_agent_chart() -> Option<Self> {
        let namespace = Program::Agent.default_namespace();
        let account = ServiceAccount::parse(AGENT_CHART_ACCOUNT, namespace)?;
        Some(Self {
            account,
            is_default: true,
        })
    }
}

impl fmt::Display for HelmAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (namespace, name) = (self.account.namespace(), self.account.name());
        write!(f, "Helm's account {namespace}/{name}")?;
        match self.is_default {
            true => f.write_str(" (default of the agent's chart)"),
            false => Ok(()),
        }
    }
}

/// Checks the rights of `account`, by default of the account that the agent or hub on this cluster has for Helm. If
/// neither runs `before_join`, checks the account of the agent's chart. Returns a line as error if the rights are not
/// known.
pub(super) async fn check(
    manifest: &Manifest,
    account: Option<&ServiceAccount>,
    release_namespace: Option<&str>,
    before_join: bool,
    cluster: &Connection,
) -> Result<Vec<Line>, Line> {
    let account = match account {
        Some(account) => HelmAccount::known(account.clone()),
        None => Box::pin(account_on(cluster, before_join)).await?,
    };
    let served = served_kinds(manifest, cluster).await?;
    let Requirements {
        rights,
        kinds,
        unserved,
    } = manifest.requirements(&served, release_namespace);
    let mut lines: Vec<Line> = unserved_kinds(&unserved).into_iter().collect();
    if rights.len() > MAX_REVIEWS {
        let text = format!(
            "Helm's rights are not known: the manifest needs {} reviews, and one check makes {MAX_REVIEWS}",
            rights.len()
        );
        lines.push(Line::defect(Mark::Unknown, text, LARGE_MANIFEST));
        return Ok(lines);
    }
    let rights = review(rights, &account.account, cluster).await;
    if !kinds.is_empty() {
        lines.push(judge(&account, kinds.len(), &rights));
    }
    Ok(lines)
}

/// Returns the account that the agent or hub has for Helm, or a line with the reason why it is not known.
async fn account_on(cluster: &Connection, before_join: bool) -> Result<HelmAccount, Line> {
    let namespaces = cluster.program_namespaces(None);
    let account = search(&namespaces, async |namespace| {
        for program in [Program::Agent, Program::Hub] {
            let pods = pods_of(cluster, namespace, program).await?;
            let account = pods
                .iter()
                .find_map(|pod| helm_account(pod, program, namespace));
            if account.is_some() {
                return Ok(account);
            }
        }
        Ok(None)
    })
    .await;
    let chart_account = HelmAccount::of_agent_chart().filter(|_| before_join);
    let text = match (account, chart_account) {
        (Ok(Some((_, account))), _) => return Ok(HelmAccount::known(account)),
        (Ok(None), Some(account)) => return Ok(account),
        (Ok(None), None) => {
            let namespaces = namespaces.join(" or ");
            format!(
                "Helm's account is not known: no agent or hub runs in the namespace {namespaces}"
            )
        }
        (Err(error), _) => format!("Helm's account is not known: {error}"),
    };
    Err(Line::defect(Mark::Unknown, text, NO_ACCOUNT))
}

/// Returns the account that Helm acts as, by default that of the pod.
fn helm_account(pod: &Value, program: Program, namespace: &str) -> Option<ServiceAccount> {
    let named = setting(pod, program, ACCOUNT_SETTING);
    ServiceAccount::parse(named.or_else(|| account_of(pod))?, namespace)
}

/// Reads the kinds of the manifest's group versions from the cluster. Returns a line if one cannot be read.
async fn served_kinds(manifest: &Manifest, cluster: &Connection) -> Result<ServedKinds, Line> {
    let requests = manifest
        .api_versions()
        .into_iter()
        .map(async |version| (version, read_kinds(version, cluster).await));
    let lists = stream::iter(requests).buffered(MAX_CONCURRENT_REQUESTS);
    let mut served = ServedKinds::new();
    for (version, list) in lists.collect::<Vec<_>>().await {
        match list {
            Lookup::Found(list) => {
                let kinds = list.resources.into_iter();
                // Without subresources.
                let kinds = kinds.filter(|kind| !kind.name.contains('/'));
                served.extend(kinds.map(|kind| {
                    let served = ServedKind {
                        plural: kind.name,
                        namespaced: kind.namespaced,
                    };
                    (KindName::new(version, kind.kind), served)
                }));
            }
            Lookup::NotFound => {}
            failure => {
                let subject = format!("the kinds of {version} on the cluster");
                return Err(unknown_line(&subject, &failure));
            }
        }
    }
    Ok(served)
}

async fn read_kinds(version: &str, cluster: &Connection) -> Lookup<APIResourceList> {
    let client = &cluster.client;
    if version.contains('/') {
        let permission = format!("get /apis/{version}");
        let request = client.list_api_group_resources(version);
        return lookup(cluster, &permission, request).await;
    }
    let permission = format!("get /api/{version}");
    let request = client.list_core_api_resources(version);
    lookup(cluster, &permission, request).await
}

async fn review(
    rights: BTreeSet<Right>,
    account: &ServiceAccount,
    cluster: &Connection,
) -> Vec<(Right, Lookup<bool>)> {
    let reviews = rights.into_iter().map(async |right| {
        let attributes = ResourceAttributes {
            namespace: right.namespace.clone(),
            ..attributes(right.verb, &right.group, &right.resource)
        };
        let (namespace, name) = (account.namespace(), account.name());
        let is_granted = may_account(cluster, namespace, name, attributes).await;
        (right, is_granted)
    });
    let reviews = stream::iter(reviews).buffered(MAX_CONCURRENT_REQUESTS);
    reviews.collect().await
}

fn unserved_kinds(kinds: &BTreeSet<&KindName>) -> Option<Line> {
    let names: Vec<String> = kinds.iter().map(ToString::to_string).collect();
    let text = format!(
        "Helm's rights are not checked for kinds that the cluster does not serve: {}",
        names.join(", ")
    );
    (!names.is_empty()).then(|| Line::defect(Mark::Note, text, UNSERVED_KINDS))
}

/// `kinds`: number of the kinds that the rights are for.
fn judge(account: &HelmAccount, kinds: usize, rights: &[(Right, Lookup<bool>)]) -> Line {
    let mut missing = BTreeMap::<String, Vec<&str>>::new();
    for (right, lookup) in rights {
        if *lookup == Lookup::Found(false) {
            missing.entry(right.objects()).or_default().push(right.verb);
        }
    }
    if !missing.is_empty() {
        let missing = missing
            .iter()
            .map(|(objects, verbs)| format!("{} {objects}", verbs.join(", ")));
        let missing: Vec<String> = missing.collect();
        let text = format!("{account} may not {}", missing.join("; "));
        // The chart adds a binding when it is installed.
        return match account.is_default {
            true => Line::defect(Mark::Note, text, RIGHTS_FROM_CHART),
            false => Line::defect(Mark::Problem, text, MISSING_RIGHTS),
        };
    }
    let mut lookups = rights.iter().map(|(_, lookup)| lookup);
    match lookups.find(|lookup| !matches!(lookup, Lookup::Found(_))) {
        Some(failure) => {
            let subject = format!("whether {account} has its rights");
            unknown_line(&subject, failure)
        }
        None => Line::ok(format!(
            "{account} has the rights for this chart ({kinds} kinds)"
        )),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn account_of_helm_is_read_from_pod() {
        let assert_account = |mut container: Value, expected: &str| {
            container["name"] = json!("krypton-agent");
            let sidecar = json!({"name": "other", "args": ["--helm-service-account=x/y"]});
            let pod = json!({"spec": {
                "serviceAccountName": "agent", "containers": [sidecar, container],
            }});
            let account = helm_account(&pod, Program::Agent, "own");
            assert_eq!(account, ServiceAccount::parse(expected, ""), "{pod}");
        };
        assert_account(json!({}), "own/agent");
        let args = ["--helm-service-account=platform/installer"];
        assert_account(json!({"args": args}), "platform/installer");
        let command = ["krypton-agent", "--helm-service-account", "installer"];
        assert_account(json!({"command": command}), "own/installer");
        let variable = json!({"name": "KRYPTON_HELM_SERVICE_ACCOUNT", "value": "platform/b"});
        assert_account(json!({"env": [variable]}), "platform/b");
    }

    #[test]
    fn missing_rights_are_grouped_by_objects() {
        let text = "apiVersion: v1\nkind: Namespace\nmetadata: {name: a}\n";
        let manifest = Manifest::parse(text).unwrap();
        let name = KindName::new("v1", "Namespace");
        let served = ServedKind {
            plural: "namespaces".to_owned(),
            namespaced: false,
        };
        let requirements = manifest.requirements(&[(name, served)].into(), Some("acme"));
        let account = ServiceAccount::parse("platform/installer", "").unwrap();
        let account = HelmAccount::known(account);
        let line = |answer: &dyn Fn(&Right) -> Lookup<bool>| {
            let rights = requirements.rights.iter().cloned();
            let rights = rights.map(|right| {
                let lookup = answer(&right);
                (right, lookup)
            });
            let rights: Vec<_> = rights.collect();
            judge(&account, requirements.kinds.len(), &rights)
        };
        let not_permitted = || Lookup::NotPermitted("create subjectaccessreviews".to_owned());

        let granted = line(&|_| Lookup::Found(true));
        assert_eq!(granted.mark, Mark::Ok);
        let expected = "Helm's account platform/installer has the rights for this chart (1 kinds)";
        assert_eq!(granted.text, expected);
        let partial = line(&|right| match (right.resource.as_str(), right.verb) {
            ("namespaces", "create" | "patch") | (_, "update") => Lookup::Found(false),
            (_, "list") => not_permitted(),
            _ => Lookup::Found(true),
        });
        assert_eq!(partial.mark, Mark::Problem);
        let expected = "Helm's account platform/installer may not create, patch namespaces; \
                        update secrets in the namespace acme";
        assert_eq!(partial.text, expected);
        let unknown = line(&|_| not_permitted());
        assert_eq!(unknown.mark, Mark::Unknown);
        assert!(unknown.text.contains("you may not create"), "{unknown:?}");
    }
}
