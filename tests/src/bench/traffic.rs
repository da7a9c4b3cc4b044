//! Counts requests to an API server by verb and resource, and separately the requests of one user.
//!
//! The user is a service account with its own FlowSchema, because the API server keeps counters for each FlowSchema.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result};
use k8s_openapi::api::{
    authentication::v1::TokenRequest, core::v1::ServiceAccount, flowcontrol::v1::FlowSchema,
    rbac::v1::ClusterRoleBinding,
};
use krypton_tests::{Cluster, eventually_within};
use kube::{
    Api, Client, Config,
    api::PostParams,
    config::{KubeConfigOptions, Kubeconfig},
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Name of the service account, its binding and the FlowSchema.
const ACCOUNT: &str = "bench";
const NAMESPACE: &str = "kube-system";
const SERIES: &str = "apiserver_flowcontrol_dispatched_requests_total{";
const DEADLINE: Duration = Duration::from_secs(60);
/// Exceeds the duration of any run.
const TOKEN_SECONDS: i64 = 24 * 3600;

/// Requests by (verb, resource).
pub(crate) type Counts = BTreeMap<(String, String), u64>;

/// Requests since the start of a control plane, or between two readings.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Traffic {
    /// Requests of all clients: controllers, nodes and the API server itself.
    pub(crate) all: Counts,
    /// Requests of the service account. Its watches count when they start.
    pub(crate) own_requests: u64,
}

impl Traffic {
    pub(crate) async fn read(cluster: &Cluster) -> Result<Self> {
        let all = cluster.requests().await?;
        let own_requests = count_own_requests(&cluster.metrics().await?)?;
        Ok(Self { all, own_requests })
    }

    /// Returns the requests since `earlier`. The API server counts neither these readings nor `/version`.
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        let mut all = Counts::new();
        for (key, now) in &self.all {
            let before = earlier.all.get(key).copied().unwrap_or_default();
            let increase = now.saturating_sub(before);
            if increase > 0 {
                all.insert(key.clone(), increase);
            }
        }
        Self {
            all,
            own_requests: self.own_requests.saturating_sub(earlier.own_requests),
        }
    }

    pub(crate) fn total(&self) -> u64 {
        self.all.values().sum()
    }
}

/// Grants the service account all rights on the cluster. Returns its kubeconfig (YAML) when the API server counts its
/// requests.
pub(crate) async fn dedicated_kubeconfig(cluster: &Cluster) -> Result<String> {
    let client = cluster.client();
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), NAMESPACE);
    create(&accounts, json!({"metadata": {"name": ACCOUNT}})).await?;
    let subject = json!({"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE});
    let binding = json!({
        "metadata": {"name": ACCOUNT},
        "roleRef":
            {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [subject],
    });
    create(&Api::<ClusterRoleBinding>::all(client.clone()), binding).await?;
    let all_resources = json!({
        "verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "clusterScope": true,
        "namespaces": ["*"],
    });
    let account = json!({
        "kind": "ServiceAccount",
        "serviceAccount": {"name": ACCOUNT, "namespace": NAMESPACE},
    });
    let schema = json!({
        "metadata": {"name": ACCOUNT},
        "spec": {
            // Requests are never queued, like an administrator's.
            "priorityLevelConfiguration": {"name": "exempt"},
            "matchingPrecedence": 2,
            "rules": [{
                "subjects": [account],
                "resourceRules": [all_resources],
                "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}],
            }],
        },
    });
    create(&Api::<FlowSchema>::all(client), schema).await?;

    let request: TokenRequest = serde_json::from_value(
        json!({"spec": {"audiences": [], "expirationSeconds": TOKEN_SECONDS}}),
    )?;
    let response = accounts
        .create_token_request(ACCOUNT, &PostParams::default(), &request)
        .await?;
    let token = response
        .status
        .context("a TokenRequest without a response")?
        .token;
    let kubeconfig = with_token(&cluster.kubeconfig_with_token(), &token)?;

    let account = client_for(&kubeconfig).await?;
    eventually_within("the FlowSchema to be counted", DEADLINE, async || {
        account.apiserver_version().await?;
        Ok((count_own_requests(&cluster.metrics().await?)? > 0).then_some(()))
    })
    .await?;
    Ok(kubeconfig)
}

async fn create<K>(api: &Api<K>, object: Value) -> Result<()>
where
    K: Clone + DeserializeOwned + serde::Serialize + std::fmt::Debug,
{
    let object: K = serde_json::from_value(object)?;
    // The API server creates its default roles shortly after startup.
    let what = format!("{} to be created", std::any::type_name::<K>());
    eventually_within(&what, DEADLINE, async || {
        match api.create(&PostParams::default(), &object).await {
            Ok(_) => Ok(Some(())),
            Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(Some(())),
            Err(error) => Err(error.into()),
        }
    })
    .await
}

/// Returns JSON, which is valid YAML.
fn with_token(kubeconfig: &str, token: &str) -> Result<String> {
    let mut kubeconfig: Value = serde_saphyr::from_str(kubeconfig)?;
    kubeconfig["users"][0]["user"] = json!({"token": token});
    Ok(kubeconfig.to_string())
}

async fn client_for(kubeconfig: &str) -> Result<Client> {
    let kubeconfig = Kubeconfig::from_yaml(kubeconfig)?;
    let options = KubeConfigOptions::default();
    Ok(Client::try_from(
        Config::from_custom_kubeconfig(kubeconfig, &options).await?,
    )?)
}

fn count_own_requests(metrics: &str) -> Result<u64> {
    let schema = format!("flow_schema=\"{ACCOUNT}\"");
    let mut count = 0;
    for line in metrics.lines() {
        let Some((labels, value)) = line
            .strip_prefix(SERIES)
            .and_then(|rest| rest.rsplit_once("} "))
        else {
            continue;
        };
        if labels.split(',').any(|label| label == schema) {
            let value: f64 = value
                .trim()
                .parse()
                .with_context(|| format!("reading {line}"))?;
            count += value as u64;
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(verb: &str, resource: &str) -> (String, String) {
        (verb.to_owned(), resource.to_owned())
    }

    #[test]
    fn only_the_subjects_flow_schema_is_counted() {
        let metrics = "\
apiserver_flowcontrol_dispatched_requests_total{flow_schema=\"bench\",priority_level=\"exempt\"} 41
apiserver_flowcontrol_dispatched_requests_total{flow_schema=\"exempt\",priority_level=\"exempt\"} 9
apiserver_flowcontrol_dispatched_requests_total{flow_schema=\"bench\",priority_level=\"other\"} 1
apiserver_flowcontrol_seats{flow_schema=\"bench\"} 5
";
        assert_eq!(count_own_requests(metrics).unwrap(), 42);
    }

    #[test]
    fn traffic_difference_omits_unchanged_entries() {
        let at = |pods, plain, own_requests| Traffic {
            all: [
                (key("LIST", "pods"), pods),
                (key("GET", ""), plain),
                (key("GET", "nodes"), 7),
            ]
            .into(),
            own_requests,
        };
        let expected = Traffic {
            all: [(key("LIST", "pods"), 3), (key("GET", ""), 6)].into(),
            own_requests: 5,
        };
        assert_eq!(at(5, 16, 8).since(&at(2, 10, 3)), expected);
        assert_eq!(at(2, 10, 3).since(&at(2, 10, 3)), Traffic::default());
    }

    #[test]
    fn kubeconfig_with_token_replaces_only_the_user() {
        let yaml =
            "clusters: [{name: a, cluster: {server: s}}]\nusers: [{name: u, user: {token: old}}]\n";
        let changed: Value = serde_json::from_str(&with_token(yaml, "new").unwrap()).unwrap();
        assert_eq!(changed["clusters"][0]["cluster"]["server"], "s");
        assert_eq!(
            changed["users"][0],
            json!({"name": "u", "user": {"token": "new"}})
        );
    }
}
