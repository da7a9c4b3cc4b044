//! `kubectl krypton migrate`: creates KryptonDeployments from the CryptoEdgeDeployments of krypton-operator. It reads the
//! old objects and changes none of them.

mod translation;

use clap::Args;
use krypton_types::names::{self, namespace_name};
use kube::api::DynamicObject;
use kube::core::{ApiResource, GroupVersionKind};
use serde::Deserialize;
use serde_json::Value;

use crate::error::KubectlError;
use crate::home::{Connection, Target};
use crate::kind::Kind;
use crate::objects::Scope;
use crate::output::{OutputFormat, encode_list};
use crate::render::{CommandOutput, Table, one_line, or_dash};
use translation::{MigrationResult, OldReferences, TranslatedDeployment, translate};

const HEADER: [&str; 6] = [
    "NAMESPACE",
    "NAME",
    "REGION",
    "KUBECONFIG",
    "RELEASE",
    "RESULT",
];
const OLD_API_VERSION: &str = "v1alpha1";
const STOP_OPERATOR_NOTE: &str = "\
Stop krypton-operator before you continue, and keep it stopped: while it runs, deleting one of the old objects
uninstalls its release.
";
const CLEAN_UP_NOTE: &str = "\
The old objects are unchanged. Once the KryptonDeployments are Ready, with krypton-operator stopped, remove the
finalizers of each old object and delete it:
  kubectl patch cryptoedgedeployment NAME -n NAMESPACE --type=merge -p '{\"metadata\":{\"finalizers\":null}}'
  kubectl delete cryptoedgedeployment NAME -n NAMESPACE
Accounts and Regions have no finalizers. You can delete them directly.
";
const EXAMPLES: &str = "\
Examples:
  # Show what the command would create
  kubectl krypton migrate --dry-run

  # Create KryptonDeployments from the CryptoEdgeDeployments of all namespaces
  kubectl krypton migrate";

#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Migrate {
    /// Only show what the command would create
    #[arg(long)]
    dry_run: bool,
    /// Namespace in which krypton-operator looked for Regions and kubeconfig Secrets. Default: the namespace of the
    /// Region. If the Region does not exist, the namespace in which the hub looks for kubeconfigs
    #[arg(long, value_name = "NAMESPACE", value_parser = namespace_name)]
    operator_namespace: Option<String>,
    /// Format: a table by default, or the KryptonDeployments themselves
    #[arg(short, long, value_name = "FORMAT")]
    output: Option<OutputFormat>,
}

pub(crate) async fn run(
    migrate: Migrate,
    target: &Target<'_>,
) -> Result<CommandOutput, KubectlError> {
    let home = target.connect().await?;
    let namespace = target.args.namespace.clone();
    let scope = namespace.map_or(Scope::All, Scope::Namespace);
    let deployments = old_objects(&home, "CryptoEdgeDeployment", &scope).await?;
    let reason = match deployments.as_deref() {
        None => "has no CRD of CryptoEdgeDeployments".to_owned(),
        Some([]) => format!("has no CryptoEdgeDeployments {scope}"),
        Some(deployments) => return migrate_all(&migrate, deployments, &scope, &home).await,
    };
    let context = &home.context;
    Ok(CommandOutput {
        stderr: format!("The cluster {context:?} {reason}: there is nothing to migrate.\n"),
        ..CommandOutput::default()
    })
}

async fn migrate_all(
    migrate: &Migrate,
    deployments: &[Value],
    scope: &Scope,
    home: &Connection,
) -> Result<CommandOutput, KubectlError> {
    let accounts = old_objects(home, "Account", scope).await?;
    let regions = old_objects(home, "Region", &Scope::All).await?;
    let new_objects = home.untyped(Kind::Deployment.resource(), scope);
    let existing = new_objects.list_values().await;
    let existing = match migrate.dry_run {
        true => none_without_crd(existing)?.unwrap_or_default(),
        false => existing?,
    };
    let mut stderr = STOP_OPERATOR_NOTE.to_owned();
    for (kind, objects) in [("Accounts", &accounts), ("Regions", &regions)] {
        if objects.is_none() {
            stderr += &format!(
                "There is no CRD of {kind}; see the notes on objects that refer to them.\n"
            );
        }
    }
    let references = OldReferences {
        accounts: accounts.unwrap_or_default(),
        regions: regions.unwrap_or_default(),
        operator_namespace: migrate.operator_namespace.clone(),
    };
    let mut rows = translate(deployments, &references, &existing);
    for row in &mut rows {
        if !migrate.dry_run {
            create(home, row).await;
        }
        for note in &row.notes {
            stderr += &format!("{}/{}: {note}\n", row.namespace, row.name);
        }
    }
    let failed_count = rows.iter().filter(|row| row.result.is_failure()).count();
    let stdout = match migrate.output {
        Some(format @ (OutputFormat::Json | OutputFormat::Yaml)) => {
            let new_objects = rows.iter().filter_map(|row| row.object.clone());
            encode_list(format, new_objects.collect())?
        }
        Some(OutputFormat::Name) => {
            let objects = rows.iter().filter_map(|row| row.object.as_ref());
            objects
                .map(|object| new_objects.name_line(object))
                .collect()
        }
        _ => table(&rows),
    };
    if migrate.dry_run {
        return Ok(CommandOutput { stdout, stderr });
    }
    stderr += CLEAN_UP_NOTE;
    let output = CommandOutput { stdout, stderr };
    if failed_count == 0 {
        return Ok(output);
    }
    let error = KubectlError::Failed(format!(
        "{failed_count} of the objects were not moved over; fix the reasons in the table and run the command again (it skips existing objects)"
    ));
    Err(error.with_output(output))
}

fn table(rows: &[TranslatedDeployment]) -> String {
    let mut table = Table::new(HEADER);
    for row in rows {
        table.push(vec![
            one_line(&row.namespace),
            one_line(&row.name),
            or_dash(row.region.as_deref()),
            or_dash(row.secret.as_deref()),
            or_dash(row.release.as_deref()),
            one_line(&row.result.message()),
        ]);
    }
    table.render()
}

/// Creates the KryptonDeployment of a row that has one. Never changes an existing object.
async fn create(home: &Connection, row: &mut TranslatedDeployment) {
    let Some(object) = row.object.clone() else {
        return;
    };
    row.result = match DynamicObject::deserialize(object) {
        Ok(object) => {
            let scope = Scope::Namespace(row.namespace.clone());
            let objects = home.untyped(Kind::Deployment.resource(), &scope);
            match objects.create(&row.name, &object).await {
                Ok(()) => MigrationResult::Created,
                Err(error) if error.code() == Some(409) => MigrationResult::Exists,
                Err(KubectlError::Call(call)) => MigrationResult::Failed(call.reason()),
                Err(error) => MigrationResult::Failed(error.to_string()),
            }
        }
        Err(error) => MigrationResult::Failed(error.to_string()),
    };
}

/// Lists objects of krypton-operator, whose APIs have no types here. Returns `None` if the CRD does not exist.
async fn old_objects(
    home: &Connection,
    kind: &str,
    scope: &Scope,
) -> Result<Option<Vec<Value>>, KubectlError> {
    let kind = GroupVersionKind::gvk(names::GROUP, OLD_API_VERSION, kind);
    let resource = ApiResource::from_gvk(&kind);
    none_without_crd(home.untyped(resource, scope).list_values().await)
}

fn none_without_crd(
    list: Result<Vec<Value>, KubectlError>,
) -> Result<Option<Vec<Value>>, KubectlError> {
    match list {
        Err(error) if error.code() == Some(404) => Ok(None),
        list => list.map(Some),
    }
}
