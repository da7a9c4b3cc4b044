//! `kubectl krypton`: the fleet and its Tenants as tables, read from the home cluster, bundles for
//! clusters that join it, the rotation of its CA, and the way here from the former operator.

mod clusters;
mod deployments;
mod join;
mod layout;
mod migrate;
mod rotate_ca;
mod tenants;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use jiff::Timestamp;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_crds::tenant::Tenant;
use kube::api::{DynamicObject, ListParams};
use kube::core::ApiResource;
use kube::{Api, Client, Resource};
use serde_json::{Value, json};

use crate::home::{Home, HomeError};
use crate::settings::{HomeChoice, HomeSource, LocalSource};
use krypton_agent::access::{client_named, reason_of};

pub use clusters::clusters_table;
pub use deployments::deployments_table;
pub use join::{JoinError, ReplaceError};
pub use rotate_ca::RotateCaError;
pub use tenants::tenants_table;

const USER_AGENT: &str = concat!("kubectl-krypton/", env!("CARGO_PKG_VERSION"));
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
const PAGE_SIZE: u32 = 500;

/// Shows the fleet of Krypton and its Tenants, and lets clusters join it.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "kubectl-krypton",
    bin_name = "kubectl krypton",
    version,
    max_term_width = 100
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Debug, Subcommand)]
enum Command {
    /// Print a table of clusters, Tenants or KryptonDeployments.
    Get(Get),
    /// Print a join bundle: a file that lets the agent of a cluster into the fleet, once.
    Join(join::Join),
    /// Replace the root of the hub's CA while agents stay connected, or tell how far that is.
    RotateCa(rotate_ca::RotateCa),
    /// Make KryptonDeployments of the CryptoEdgeDeployments of the former operator, or show them; the old objects
    /// stay as they are.
    Migrate(migrate::Migrate),
    /// Print the version of this program.
    Version,
}

#[derive(Clone, Debug, Args)]
struct Get {
    kind: Kind,
    /// The one of this name; a Tenant with a line for each cluster that it is on.
    #[arg(conflicts_with = "all_namespaces")]
    name: Option<String>,
    /// Namespace of Tenants and KryptonDeployments; by default that of the context.
    #[arg(
        short,
        long,
        value_name = "NAMESPACE",
        conflicts_with = "all_namespaces"
    )]
    namespace: Option<String>,
    /// Those of all namespaces.
    #[arg(short = 'A', long)]
    all_namespaces: bool,
    /// Format: a table with more columns and a line per cluster, or the objects themselves.
    #[arg(short, long, value_name = "FORMAT")]
    output: Option<Output>,
    #[command(flatten)]
    home: HomeArgs,
}

/// Which cluster is home.
#[derive(Clone, Debug, Args)]
struct HomeArgs {
    /// Kubeconfig file of the home cluster; by default KUBECONFIG, then .kube/config in HOME.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig; by default its current-context.
    #[arg(long, value_name = "CONTEXT")]
    context: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    #[value(aliases = ["cluster", "edgecluster", "edgeclusters", "ec"])]
    Clusters,
    #[value(aliases = ["tenant", "tn"])]
    Tenants,
    #[value(aliases = ["deployment", "kryptondeployment", "kryptondeployments", "kd"])]
    Deployments,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    Wide,
    Json,
    Yaml,
}

/// Why nothing can be shown or made. One line each, with the reasons below it.
#[derive(Debug, thiserror::Error)]
pub enum KubectlError {
    /// Wrong usage, or a call for help: prints itself.
    #[error(transparent)]
    Usage(clap::Error),
    #[error("no home cluster")]
    Home(#[source] HomeError),
    #[error("building a client of the home cluster failed")]
    Client(#[source] kube::Error),
    #[error(
        "the cluster {context:?} has no {plural}: it is not a home cluster of Krypton, or its CRDs are not installed yet; choose another with --context or --kubeconfig, or install the CRDs"
    )]
    NoSuchKind { context: String, plural: String },
    #[error(
        "you may not list {plural} {place} on the cluster {context:?}; ask for the verb list on {plural}.mesh.openkcm.io ({message})"
    )]
    Forbidden {
        context: String,
        plural: String,
        place: String,
        message: String,
    },
    #[error("the cluster {context:?} does not accept your credentials; log in again ({message})")]
    Unauthorized { context: String, message: String },
    #[error("the cluster {context:?} did not answer within 30 s; check that it is reachable")]
    TimedOut { context: String },
    #[error("listing {plural} on the cluster {context:?} failed: {reason}")]
    List {
        context: String,
        plural: String,
        reason: String,
    },
    #[error("there is no {what} of the name {name:?} {place} on the cluster {context:?}")]
    NotFound {
        context: String,
        what: &'static str,
        name: String,
        place: String,
    },
    #[error("writing the {format} failed: {reason}")]
    Encode {
        format: &'static str,
        reason: String,
    },
    /// Some of what was asked for is done, and `printed` says what.
    #[error(
        "{left} of the objects were not moved over; the reasons are in the table, and what is done is not done again"
    )]
    Incomplete { printed: Printed, left: usize },
    #[error(transparent)]
    Join(Box<JoinError>),
    #[error(transparent)]
    RotateCa(Box<RotateCaError>),
}

/// What to print, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Printed {
    pub stdout: String,
    /// A remark for the terminal, as kubectl's "No resources found".
    pub stderr: String,
}

/// Runs one command line, the program's name first. `env` reads a variable.
pub async fn run(
    args: impl IntoIterator<Item = OsString>,
    env: &dyn Fn(&str) -> Option<String>,
    now: Timestamp,
) -> Result<Printed, KubectlError> {
    let cli = Cli::try_parse_from(args).map_err(KubectlError::Usage)?;
    match cli.command {
        Command::Get(get) => Box::pin(run_get(get, env, now)).await,
        Command::Join(join) => {
            let home = Box::pin(home(&join.home, env)).await?;
            let (context, namespace) = (home.context_name, home.config.default_namespace.clone());
            let client = client_named(home.config, USER_AGENT).map_err(KubectlError::Client)?;
            Box::pin(join::run(join, client, &context, &namespace, now))
                .await
                .map_err(|error| KubectlError::Join(Box::new(error)))
        }
        Command::RotateCa(rotate) => {
            let home = Box::pin(home(&rotate.home, env)).await?;
            let (context, namespace) = (home.context_name, home.config.default_namespace.clone());
            let client = client_named(home.config, USER_AGENT).map_err(KubectlError::Client)?;
            Box::pin(rotate_ca::run(rotate, client, &context, &namespace, now))
                .await
                .map_err(|error| KubectlError::RotateCa(Box::new(error)))
        }
        Command::Migrate(migrate) => {
            let home = Box::pin(home(&migrate.home, env)).await?;
            let context = home.context_name;
            let client = client_named(home.config, USER_AGENT).map_err(KubectlError::Client)?;
            Box::pin(migrate::run(migrate, client, &context)).await
        }
        Command::Version => Ok(Printed {
            stdout: format!("kubectl-krypton {}\n", env!("CARGO_PKG_VERSION")),
            stderr: String::new(),
        }),
    }
}

async fn run_get(
    get: Get,
    env: &dyn Fn(&str) -> Option<String>,
    now: Timestamp,
) -> Result<Printed, KubectlError> {
    let home = Box::pin(home(&get.home, env)).await?;
    let place = place(&get, &home);
    let context = home.context_name;
    let client = client_named(home.config, USER_AGENT).map_err(KubectlError::Client)?;
    let clusters = ApiResource::erase::<EdgeCluster>(&());
    let (kind, what) = match get.kind {
        Kind::Clusters => (&clusters, "EdgeCluster"),
        Kind::Tenants => (&ApiResource::erase::<Tenant>(&()), "Tenant"),
        Kind::Deployments => (
            &ApiResource::erase::<KryptonDeployment>(&()),
            "KryptonDeployment",
        ),
    };
    let name = get.name.as_deref();
    let objects = list(client.clone(), kind, &place, name, &context).await?;
    if let (Some(name), true) = (name, objects.is_empty()) {
        return Err(KubectlError::NotFound {
            context,
            what,
            name: name.to_owned(),
            place: place.in_words(),
        });
    }
    let one = name
        .and_then(|_| objects.first())
        .filter(|_| get.kind == Kind::Tenants);
    if let (Some(tenant), None | Some(Output::Wide)) = (one, get.output) {
        let members = if tenants::is_summary(tenant) {
            list(client, &clusters, &Place::Cluster, None, &context).await?
        } else {
            Vec::new()
        };
        return Ok(tenants::one_tenant(tenant, &members, now));
    }
    printed(&get, &place, objects, now)
}

async fn home(args: &HomeArgs, env: &dyn Fn(&str) -> Option<String>) -> Result<Home, KubectlError> {
    let list = env("KUBECONFIG").unwrap_or_default();
    let source = HomeSource {
        choice: HomeChoice::Local,
        context: args.context.clone(),
        local: LocalSource {
            flag: args.kubeconfig.clone(),
            kubeconfig_variable: std::env::split_paths(&list)
                .filter(|path| !path.as_os_str().is_empty())
                .collect(),
            user_file: env("HOME").map(|home| PathBuf::from(home).join(".kube/config")),
        },
    };
    // The policy is for kubeconfigs in Secrets, and there is none here.
    Home::choose(&source, &Default::default())
        .await
        .map_err(KubectlError::Home)
}

/// Where objects are listed.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    Cluster,
    Namespace(String),
}

impl Place {
    fn in_words(&self) -> String {
        match self {
            Self::Cluster => "in all namespaces".to_owned(),
            Self::Namespace(namespace) => format!("in the namespace {namespace}"),
        }
    }
}

fn place(get: &Get, home: &Home) -> Place {
    match (&get.namespace, get.kind) {
        (_, Kind::Clusters) => Place::Cluster,
        _ if get.all_namespaces => Place::Cluster,
        (Some(namespace), _) => Place::Namespace(namespace.clone()),
        (None, _) => Place::Namespace(home.config.default_namespace.clone()),
    }
}

/// Untyped, so that one object that does not decode hides no other, and none of its fields.
async fn list(
    client: Client,
    kind: &ApiResource,
    place: &Place,
    name: Option<&str>,
    context: &str,
) -> Result<Vec<Value>, KubectlError> {
    let api: Api<DynamicObject> = match place {
        Place::Cluster => Api::all_with(client, kind),
        Place::Namespace(namespace) => Api::namespaced_with(client, namespace, kind),
    };
    let mut params = ListParams::default().limit(PAGE_SIZE);
    if let Some(name) = name {
        params = params.fields(&format!("metadata.name={name}"));
    }
    let mut objects = Vec::new();
    loop {
        let page = tokio::time::timeout(REQUEST_TIMEOUT, api.list(&params))
            .await
            .map_err(|_| KubectlError::TimedOut {
                context: context.to_owned(),
            })?
            .map_err(|error| explain(error, kind, place, context))?;
        for object in page.items {
            objects.push(as_value(object, kind)?);
        }
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(objects),
        }
    }
}

/// As kubectl shows it: with apiVersion and kind, which lists leave out, and without managedFields.
fn as_value(mut object: DynamicObject, kind: &ApiResource) -> Result<Value, KubectlError> {
    object.metadata.managed_fields = None;
    object.types = None;
    let encoded = serde_json::to_value(&object);
    let fields = encoded.map_err(|error| KubectlError::Encode {
        format: "object",
        reason: error.to_string(),
    })?;
    let mut value = json!({ "apiVersion": kind.api_version, "kind": kind.kind });
    if let (Some(value), Value::Object(fields)) = (value.as_object_mut(), fields) {
        value.extend(fields);
    }
    Ok(value)
}

fn explain(error: kube::Error, kind: &ApiResource, place: &Place, context: &str) -> KubectlError {
    let (context, plural) = (context.to_owned(), kind.plural.clone());
    let kube::Error::Api(status) = &error else {
        return KubectlError::List {
            context,
            plural,
            reason: layout::one_line(&reason_of(&error)),
        };
    };
    let message = layout::one_line(&status.message);
    match status.code {
        404 => KubectlError::NoSuchKind { context, plural },
        401 => KubectlError::Unauthorized { context, message },
        403 => {
            let place = place.in_words();
            KubectlError::Forbidden {
                context,
                plural,
                place,
                message,
            }
        }
        _ => KubectlError::List {
            context,
            plural,
            reason: message,
        },
    }
}

fn printed(
    get: &Get,
    place: &Place,
    objects: Vec<Value>,
    now: Timestamp,
) -> Result<Printed, KubectlError> {
    let wide = get.output == Some(Output::Wide);
    let stdout = match get.output {
        Some(format @ (Output::Json | Output::Yaml)) => encode(format, objects)?,
        _ if objects.is_empty() => {
            let stderr = match place {
                Place::Cluster => "No resources found\n".to_owned(),
                Place::Namespace(namespace) => {
                    format!("No resources found in {namespace} namespace.\n")
                }
            };
            return Ok(Printed {
                stdout: String::new(),
                stderr,
            });
        }
        _ => match get.kind {
            Kind::Clusters => clusters_table(&objects, wide, now),
            Kind::Tenants => tenants_table(&objects, wide, now),
            Kind::Deployments => deployments_table(&objects, wide, now),
        },
    };
    Ok(Printed {
        stdout,
        stderr: String::new(),
    })
}

fn encode(format: Output, items: Vec<Value>) -> Result<String, KubectlError> {
    let list = json!({ "apiVersion": "v1", "kind": "List", "metadata": {}, "items": items });
    if format == Output::Json {
        let text = serde_json::to_string_pretty(&list);
        return text
            .map(|text| text + "\n")
            .map_err(|error| KubectlError::Encode {
                format: "JSON",
                reason: error.to_string(),
            });
    }
    serde_saphyr::to_string(&list).map_err(|error| KubectlError::Encode {
        format: "YAML",
        reason: error.to_string(),
    })
}

/// Whether `object` is of the kind it was listed as, and if so its typed form.
fn decoded<K: Resource<DynamicType = ()> + serde::de::DeserializeOwned>(
    object: &Value,
) -> Option<K> {
    <K as serde::Deserialize>::deserialize(object).ok()
}

#[cfg(test)]
mod tests;
