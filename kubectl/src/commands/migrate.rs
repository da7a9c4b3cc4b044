//! `kubectl krypton migrate`: creates KryptonDeployments from the CryptoEdgeDeployments of krypton-operator. It reads the
//! old objects and changes none of them.

mod translation;

use clap::Args;
use krypton_types::names::{self, namespace_name};
use kube::api::{DynamicObject, PostParams};
use kube::core::ApiResource;
use serde::Deserialize;
use serde_json::Value;

use crate::error::KubectlError;
use crate::home::{Connection, Env, HomeArgs, connect};
use crate::kind::Kind;
use crate::objects::Scope;
use crate::render::{Output, Printed, Table, encode_list, one_line, or_dash};
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
const BEFORE: &str = "\
Stop krypton-operator before you continue, and keep it stopped: while it runs, deleting one of the old objects
uninstalls its release.
";
const AFTER: &str = "\
The old objects are unchanged. Once the KryptonDeployments are Ready, with krypton-operator stopped, remove the
finalizers of each old object and delete it:
  kubectl patch cryptoedgedeployment NAME -n NAMESPACE --type=merge -p '{\"metadata\":{\"finalizers\":null}}'
  kubectl delete cryptoedgedeployment NAME -n NAMESPACE
Accounts and Regions have no finalizers. You can delete them directly.
";

#[derive(Clone, Debug, Args)]
pub(crate) struct Migrate {
    /// Only show what the command would create
    #[arg(long)]
    dry_run: bool,
    /// Only the objects of this namespace; by default those of all
    #[arg(short, long, value_name = "NAMESPACE", value_parser = namespace_name)]
    namespace: Option<String>,
    /// Namespace in which krypton-operator looked for Regions and kubeconfig Secrets; by default the namespace of the
    /// Region, or, if the Region does not exist, the one in which the hub looks for kubeconfigs
    #[arg(long, value_name = "NAMESPACE", value_parser = namespace_name)]
    operator_namespace: Option<String>,
    /// Format: a table by default, or the KryptonDeployments themselves
    #[arg(short, long, value_name = "FORMAT")]
    output: Option<Output>,
    #[command(flatten)]
    home: HomeArgs,
}

pub(crate) async fn run(migrate: Migrate, env: Env<'_>) -> Result<Printed, KubectlError> {
    let home = connect(&migrate.home, env).await?;
    let scope = migrate
        .namespace
        .clone()
        .map_or(Scope::All, Scope::Namespace);
    let read = async |kind: &str, plural: &str, scope: &Scope| {
        optional(
            home.untyped(old_resource(kind, plural), scope)
                .values(None)
                .await,
        )
    };
    let deployments = read("CryptoEdgeDeployment", "cryptoedgedeployments", &scope).await?;
    let Some(deployments) = deployments else {
        return Ok(nothing(&home, "has no CRD of CryptoEdgeDeployments"));
    };
    if deployments.is_empty() {
        return Ok(nothing(
            &home,
            &format!("has no CryptoEdgeDeployments {scope}"),
        ));
    }
    let accounts = read("Account", "accounts", &scope).await?;
    let regions = read("Region", "regions", &Scope::All).await?;
    let new = home.untyped(Kind::Deployment.resource(), &scope);
    let listed = new.values(None).await;
    let existing = match migrate.dry_run {
        true => optional(listed)?.unwrap_or_default(),
        false => listed?,
    };
    let mut stderr = BEFORE.to_owned();
    for (kind, read) in [("Accounts", &accounts), ("Regions", &regions)] {
        if read.is_none() {
            stderr += &format!(
                "There is no CRD of {kind}; see the notes on objects that refer to them.\n"
            );
        }
    }
    let old = Old {
        accounts: accounts.unwrap_or_default(),
        regions: regions.unwrap_or_default(),
        operator_namespace: migrate.operator_namespace,
    };
    let mut rows = translate(&deployments, &old, &existing);
    if !migrate.dry_run {
        for row in &mut rows {
            create(&home, row).await;
        }
    }
    for row in &rows {
        for note in &row.notes {
            stderr += &format!("{}/{}: {note}\n", row.namespace, row.name);
        }
    }
    if !migrate.dry_run {
        stderr += AFTER;
    }
    let left = rows.iter().filter(|row| row.verdict.is_left()).count();
    let stdout = match migrate.output {
        Some(format @ (Output::Json | Output::Yaml)) => {
            let new = rows.iter().filter_map(|row| row.object.clone());
            encode_list(format, new.collect())?
        }
        _ => table(&rows),
    };
    let printed = Printed { stdout, stderr };
    if migrate.dry_run || left == 0 {
        return Ok(printed);
    }
    let error = Box::new(KubectlError::Failed(format!(
        "{left} of the objects were not moved over; fix the reasons in the table and run the command again (it skips existing objects)"
    )));
    Err(KubectlError::Partly { printed, error })
}

fn table(rows: &[Translated]) -> String {
    let mut table = Table::new(HEADER);
    for row in rows {
        table.push(vec![
            one_line(&row.namespace),
            one_line(&row.name),
            or_dash(row.region.as_deref()),
            or_dash(row.secret.as_deref()),
            or_dash(row.release.as_deref()),
            one_line(&row.verdict.message()),
        ]);
    }
    table.render()
}

/// Creates the KryptonDeployment of a row that has one. Never changes an existing object.
async fn create(home: &Connection, row: &mut Translated) {
    let Some(object) = row
        .object
        .clone()
        .filter(|_| row.verdict == Verdict::WouldBeCreated)
    else {
        return;
    };
    row.verdict = match DynamicObject::deserialize(object) {
        Ok(object) => {
            let scope = Scope::Namespace(row.namespace.clone());
            let objects = home.untyped(Kind::Deployment.resource(), &scope);
            let params = PostParams::default();
            let creating = objects.api.create(&params, &object);
            match objects.call("create", &row.name, creating).await {
                Ok(_) => Verdict::Created,
                Err(error) if error.code() == Some(409) => Verdict::Exists,
                Err(KubectlError::Call(failed)) => Verdict::Failed(failed.reason()),
                Err(error) => Verdict::Failed(error.to_string()),
            }
        }
        Err(error) => Verdict::Failed(error.to_string()),
    };
}

/// An API of krypton-operator, which has no type here.
fn old_resource(kind: &str, plural: &str) -> ApiResource {
    ApiResource {
        group: names::GROUP.to_owned(),
        version: VERSION.to_owned(),
        api_version: format!("{}/{VERSION}", names::GROUP),
        kind: kind.to_owned(),
        plural: plural.to_owned(),
    }
}

/// Returns `None` if the CRD does not exist.
fn optional(listed: Result<Vec<Value>, KubectlError>) -> Result<Option<Vec<Value>>, KubectlError> {
    match listed {
        Err(error) if error.code() == Some(404) => Ok(None),
        listed => listed.map(Some),
    }
}

fn nothing(home: &Connection, why: &str) -> Printed {
    let context = &home.context;
    Printed {
        stderr: format!("The cluster {context:?} {why}: there is nothing to migrate.\n"),
        ..Printed::default()
    }
}
