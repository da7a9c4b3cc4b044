//! `kubectl krypton migrate`: the KryptonDeployments that the original's CryptoEdgeDeployments become. It reads the
//! old objects and changes none of them.

mod translation;

use clap::Args;
use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_runtime::access::reason_of;
use krypton_types::names::{self, namespace_name};
use kube::Client;
use kube::api::{Api, DynamicObject, PostParams};
use kube::core::ApiResource;
use serde::Deserialize;
use serde_json::Value;

use crate::error::KubectlError;
use crate::home::{HomeArgs, Place, REQUEST_TIMEOUT};
use crate::render::{Output, Printed, Table, encode, one_line, or_dash};
use translation::{Old, Translated, Verdict, translate};

const HEADER: [&str; 6] = [
    "NAMESPACE",
    "NAME",
    "REGION",
    "KUBECONFIG",
    "RELEASE",
    "RESULT",
];
const VERSION: &str = "v1alpha1";
/// What is to be done by hand, in this order.
const FIRST: &str = "\
Stop the former operator before anything else, and keep it stopped: while it runs, deleting one of the old objects
uninstalls its release.
";
const AFTERWARDS: &str = "\
The old objects are as they were. Once the KryptonDeployments are Ready, and with the former operator stopped, let go of
each of them and delete it:
  kubectl patch cryptoedgedeployment NAME -n NAMESPACE --type=merge -p '{\"metadata\":{\"finalizers\":null}}'
  kubectl delete cryptoedgedeployment NAME -n NAMESPACE
Accounts and Regions have no finalizers and are deleted as they are.
";

#[derive(Clone, Debug, Args)]
pub(crate) struct Migrate {
    /// Only print what would be created.
    #[arg(long)]
    dry_run: bool,
    /// Only the objects of this namespace; by default those of all.
    #[arg(short, long, value_name = "NAMESPACE", value_parser = namespace_name)]
    namespace: Option<String>,
    /// Namespace of the former operator, where it looked for Regions and kubeconfig Secrets; by default where the
    /// Region is, if there is one, else where the hub looks for kubeconfigs.
    #[arg(long, value_name = "NAMESPACE", value_parser = namespace_name)]
    operator_namespace: Option<String>,
    /// Format: a table by default, or the KryptonDeployments themselves.
    #[arg(short, long, value_name = "FORMAT")]
    output: Option<Output>,
    #[command(flatten)]
    pub(crate) home: HomeArgs,
}

pub(crate) async fn run(
    migrate: Migrate,
    client: Client,
    context: &str,
) -> Result<Printed, KubectlError> {
    let place = migrate
        .namespace
        .clone()
        .map_or(Place::Cluster, Place::Namespace);
    let read = async |kind: &str, plural: &str, place: &Place| {
        found(crate::home::list(client.clone(), &old(kind, plural), place, None, context).await)
    };
    let deployments = read("CryptoEdgeDeployment", "cryptoedgedeployments", &place).await?;
    let Some(deployments) = deployments else {
        return Ok(nothing(context, "has no CRD of CryptoEdgeDeployments"));
    };
    if deployments.is_empty() {
        let why = format!("has no CryptoEdgeDeployments {}", place.in_words());
        return Ok(nothing(context, &why));
    }
    let accounts = read("Account", "accounts", &place).await?;
    let regions = read("Region", "regions", &Place::Cluster).await?;
    let kind = ApiResource::erase::<KryptonDeployment>(&());
    let listed = crate::home::list(client.clone(), &kind, &place, None, context).await;
    let existing = match migrate.dry_run {
        true => found(listed)?.unwrap_or_default(),
        false => listed?,
    };
    let mut stderr = FIRST.to_owned();
    let absent = [
        ("Accounts", accounts.is_none()),
        ("Regions", regions.is_none()),
    ];
    for (kind, _) in absent.into_iter().filter(|(_, absent)| *absent) {
        stderr.push_str(&format!(
            "There is no CRD of {kind}; what refers to them is told of below.\n"
        ));
    }
    let old = Old {
        accounts: accounts.unwrap_or_default(),
        regions: regions.unwrap_or_default(),
        operator_namespace: migrate.operator_namespace.clone(),
    };
    let mut rows = translate(&deployments, &old, &existing);
    if !migrate.dry_run {
        for row in &mut rows {
            create(&client, &kind, row).await;
        }
    }
    for (row, note) in rows
        .iter()
        .flat_map(|row| row.notes.iter().map(move |note| (row, note)))
    {
        stderr.push_str(&format!("{}/{}: {note}\n", row.namespace, row.name));
    }
    let left = rows.iter().filter(|row| row.verdict.is_left()).count();
    let stdout = match migrate.output {
        Some(format @ (Output::Json | Output::Yaml)) => {
            let made = rows.iter().filter_map(|row| row.object.clone());
            encode(format, made.collect())?
        }
        _ => table(&rows),
    };
    if !migrate.dry_run {
        stderr.push_str(AFTERWARDS);
    }
    let printed = Printed { stdout, stderr };
    match migrate.dry_run || left == 0 {
        true => Ok(printed),
        false => Err(KubectlError::Incomplete { printed, left }),
    }
}

fn table(rows: &[Translated]) -> String {
    let mut table = Table::new(&HEADER);
    for row in rows {
        table.push(vec![
            one_line(&row.namespace),
            one_line(&row.name),
            or_dash(row.region.as_deref().map(one_line)),
            or_dash(row.secret.as_deref().map(one_line)),
            or_dash(row.release.clone()),
            one_line(&row.verdict.words()),
        ]);
    }
    table.render()
}

/// Creates it, if it is to be; never writes to one that is there.
async fn create(client: &Client, kind: &ApiResource, row: &mut Translated) {
    let Some(object) = row
        .object
        .clone()
        .filter(|_| row.verdict == Verdict::WouldBeCreated)
    else {
        return;
    };
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &row.namespace, kind);
    let object = match DynamicObject::deserialize(object) {
        Ok(object) => object,
        Err(error) => {
            row.verdict = Verdict::Failed(error.to_string());
            return;
        }
    };
    let params = PostParams::default();
    row.verdict = match tokio::time::timeout(REQUEST_TIMEOUT, api.create(&params, &object)).await {
        Ok(Ok(_)) => Verdict::Created,
        Ok(Err(kube::Error::Api(status))) if status.is_already_exists() => Verdict::Exists,
        Ok(Err(kube::Error::Api(status))) => Verdict::Failed(one_line(&status.message)),
        Ok(Err(error)) => Verdict::Failed(one_line(&reason_of(&error))),
        Err(_) => Verdict::Failed("no answer within 30 s; look whether it is there".to_owned()),
    };
}

/// An API of the original's, which has no type here.
fn old(kind: &str, plural: &str) -> ApiResource {
    ApiResource {
        group: names::GROUP.to_owned(),
        version: VERSION.to_owned(),
        api_version: format!("{}/{VERSION}", names::GROUP),
        kind: kind.to_owned(),
        plural: plural.to_owned(),
    }
}

/// None where there is no such CRD.
fn found(listed: Result<Vec<Value>, KubectlError>) -> Result<Option<Vec<Value>>, KubectlError> {
    match listed {
        Ok(objects) => Ok(Some(objects)),
        Err(KubectlError::NoSuchKind { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

fn nothing(context: &str, why: &str) -> Printed {
    Printed {
        stdout: String::new(),
        stderr: format!("The cluster {context:?} {why}: there is nothing to move over.\n"),
    }
}
