//! `kubectl krypton`: the fleet and its Tenants as tables, read from the home cluster, bundles for
//! clusters that join it and their leave, pauses and retries, the rotation of its CA, what is logged, and the way here
//! from the former operator.

mod accept_release;
mod change;
mod clusters;
mod complete;
mod debug_port;
mod deployments;
mod exit_code;
mod explain;
mod join;
mod layout;
mod leave;
mod log_level;
mod migrate;
mod rotate_ca;
mod support_bundle;
mod tenants;
mod version;
mod watch;

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use jiff::Timestamp;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_crds::tenant::Tenant;
use kube::api::{DynamicObject, ListParams};
use kube::config::Kubeconfig;
use kube::core::ApiResource;
use kube::{Api, Client, Resource};
use serde_json::{Value, json};

use crate::home::{Home, HomeError};
use crate::settings::{HomeChoice, HomeSource, LocalSource};
use krypton_agent::access::{client_named, reason_of};

use change::Verb;
use clusters::clusters_table;
use deployments::deployments_table;
use layout::Table;
use tenants::tenants_table;

pub use exit_code::{ExitCode, MEANINGS};
pub use join::{JoinError, ReplaceError};
pub use rotate_ca::RotateCaError;

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
    /// Tell of a Tenant how it stands, why, and what comes next, from home to each cluster.
    Explain(explain::Explain),
    /// Have nothing written for an object, on whichever cluster it is, but its status.
    Pause(change::Change),
    /// End such a pause.
    Resume(change::Change),
    /// Try now what has failed, whatever pause was to come before the next attempt.
    Resync(change::Resync),
    /// Trust a stored Helm release that has changed since Krypton deployed it
    AcceptRelease(accept_release::AcceptRelease),
    /// Let the hub connect to clusters whose source lies in another namespace than its own.
    Accept(change::Members),
    /// Refuse the agents of clusters, and do not go there either.
    Ban(change::Members),
    /// Let them in again.
    Unban(change::Members),
    /// Print a join bundle: a file that lets the agent of a cluster into the fleet, once.
    Join(join::Join),
    /// Take a cluster out of the fleet.
    Leave(leave::Leave),
    /// Replace the root of the hub's CA while agents stay connected, or tell how far that is.
    RotateCa(rotate_ca::RotateCa),
    /// Show what hub or agent log, or change it for a while.
    LogLevel(log_level::LogLevel),
    /// Make KryptonDeployments of the CryptoEdgeDeployments of the former operator, or show them; the old objects
    /// stay as they are.
    Migrate(migrate::Migrate),
    /// Collect what somebody needs to help, without secrets, in one file.
    SupportBundle(support_bundle::SupportBundle),
    /// Print the version of this program, of the hub and of the agents.
    Version(version::Versions),
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
    /// Go on with each change, until Ctrl-C.
    #[arg(short, long)]
    watch: bool,
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
    #[error("you may not {verb} {plural} {place} on the cluster {context:?}; ask for {missing}")]
    Forbidden {
        context: String,
        verb: &'static str,
        plural: String,
        place: String,
        /// The right, by the group that a role names it with, and what the apiserver says.
        missing: String,
    },
    #[error("the cluster {context:?} does not accept your credentials; log in again ({message})")]
    Unauthorized { context: String, message: String },
    #[error("the cluster {context:?} did not answer within 30 s; check that it is reachable")]
    TimedOut { context: String },
    #[error(
        "the cluster {context:?} cannot be reached; check that it runs, and the way there ({reason})"
    )]
    Unreachable { context: String, reason: String },
    #[error("{reason}")]
    Release { reason: String },
    #[error("the verb {verb} on {plural} failed on the cluster {context:?}: {reason}")]
    Call {
        context: String,
        verb: &'static str,
        plural: String,
        reason: String,
    },
    #[error("listing {plural} on the cluster {context:?} failed: {reason}")]
    List {
        context: String,
        plural: String,
        reason: String,
    },
    #[error("there is no {what} of the name {name:?} {place} on the cluster {context:?}")]
    NotFound {
        context: String,
        what: String,
        name: String,
        place: String,
    },
    #[error(
        "there is no Tenant {tenant} on the cluster {context:?}; one that was made on a member alone is told of there: give that cluster's --context, or --on MEMBER for what home knows of the member"
    )]
    NoTenant { context: String, tenant: String },
    /// It is told how it stands, and `printed` says it.
    #[error("the Tenant is not Ready, or that is not known")]
    NotReady { printed: Printed },
    #[error(
        "no pod of the {program} runs {place} on the cluster {context:?}; name its namespace with -n, or its cluster with --context or --kubeconfig"
    )]
    NoPod {
        context: String,
        program: &'static str,
        place: String,
    },
    #[error("the debug port of {whose} does not answer: {reason}")]
    DebugPort { whose: String, reason: String },
    /// The state of things does not allow it now.
    #[error("{why}")]
    Refused { why: String },
    /// Some of what was asked for is done, and `printed` says what.
    #[error("{error}")]
    Partly {
        printed: Printed,
        error: Box<KubectlError>,
    },
    #[error("writing the output failed: {reason}")]
    Write { reason: String },
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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Printed {
    pub stdout: String,
    /// A remark for the terminal, as kubectl's "No resources found".
    pub stderr: String,
}

/// The home cluster, as it was chosen.
struct Connection {
    client: Client,
    context: String,
    /// The context's.
    namespace: String,
}

impl Connection {
    async fn in_time<T>(&self, call: impl Future<Output = T>) -> Result<T, KubectlError> {
        let answered = tokio::time::timeout(REQUEST_TIMEOUT, call).await;
        answered.map_err(|_| KubectlError::TimedOut {
            context: self.context.clone(),
        })
    }

    fn not_found(&self, what: &str, name: &str, place: &Place) -> KubectlError {
        KubectlError::NotFound {
            context: self.context.clone(),
            what: what.to_owned(),
            name: name.to_owned(),
            place: place.in_words(),
        }
    }

    /// Whether it is a home, as far as can be seen.
    async fn has_members(&self) -> bool {
        let api: Api<EdgeCluster> = Api::all(self.client.clone());
        let one = ListParams::default().limit(1);
        let found = self.in_time(api.list_metadata(&one)).await;
        matches!(found, Ok(Ok(found)) if !found.items.is_empty())
    }
}

async fn connect(
    args: &HomeArgs,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Connection, KubectlError> {
    let home = Box::pin(home(args, env)).await?;
    Ok(Connection {
        context: home.context_name,
        namespace: home.config.default_namespace.clone(),
        client: client_named(home.config, USER_AGENT).map_err(KubectlError::Client)?,
    })
}

/// The contexts of the user's kubeconfigs.
fn contexts(env: &dyn Fn(&str) -> Option<String>) -> Vec<String> {
    let list = env("KUBECONFIG").unwrap_or_default();
    let own = env("HOME").map(|home| PathBuf::from(home).join(".kube/config"));
    let named = std::env::split_paths(&list).filter(|path| !path.as_os_str().is_empty());
    let mut files: Vec<PathBuf> = named.collect();
    if files.is_empty() {
        files.extend(own);
    }
    let read = files
        .iter()
        .filter_map(|file| Kubeconfig::read_from(file).ok());
    read.flat_map(|config| config.contexts)
        .map(|context| context.name)
        .collect()
}

/// Runs one command line, the program's name first. `env` reads a variable; what goes on for as long as
/// somebody reads goes to `out`.
pub async fn run(
    args: impl IntoIterator<Item = OsString>,
    env: &dyn Fn(&str) -> Option<String>,
    now: Timestamp,
    out: &mut dyn Write,
) -> Result<Printed, KubectlError> {
    let args: Vec<OsString> = args.into_iter().collect();
    if complete::is_asked(args.first().map(OsString::as_os_str)) {
        let words = args
            .iter()
            .skip(1)
            .map(|word| word.to_string_lossy().into_owned());
        let words: Vec<String> = words.collect();
        let stdout = Box::pin(complete::answer(&words, env)).await;
        let stderr = String::new();
        return Ok(Printed { stdout, stderr });
    }
    let cli = Cli::try_parse_from(args).map_err(KubectlError::Usage)?;
    let changed = |verb, aim: change::Aim, home: HomeArgs| {
        Box::pin(async move {
            let home = connect(&home, env).await?;
            change::run(verb, aim, &home, now).await
        })
    };
    match cli.command {
        Command::Get(get) => Box::pin(run_get(get, env, now, out)).await,
        Command::Explain(args) => {
            let home = connect(&args.home, env).await?;
            Box::pin(explain::run(args, &home, now)).await
        }
        Command::Pause(args) => {
            let home = args.home.clone();
            changed(Verb::Pause, args.into(), home).await
        }
        Command::Resume(args) => {
            let home = args.home.clone();
            changed(Verb::Resume, args.into(), home).await
        }
        Command::Resync(args) => {
            let home = args.home.clone();
            changed(Verb::Resync, args.into(), home).await
        }
        Command::AcceptRelease(args) => {
            let cluster = connect(&args.home, env).await?;
            Box::pin(accept_release::run(args, &cluster)).await
        }
        Command::Accept(args) => {
            let home = args.home.clone();
            changed(Verb::Accept, args.into(), home).await
        }
        Command::Ban(args) => {
            let home = args.home.clone();
            changed(Verb::Ban, args.into(), home).await
        }
        Command::Unban(args) => {
            let home = args.home.clone();
            changed(Verb::Unban, args.into(), home).await
        }
        Command::Join(join) => {
            let home = connect(&join.home, env).await?;
            let running = join::run(join, home.client, &home.context, &home.namespace, now);
            Box::pin(running)
                .await
                .map_err(|error| KubectlError::Join(Box::new(error)))
        }
        Command::Leave(leave) => {
            let home = connect(&leave.home, env).await?;
            Box::pin(leave::run(leave, &home)).await
        }
        Command::RotateCa(rotate) => {
            let home = connect(&rotate.home, env).await?;
            let running = rotate_ca::run(rotate, home.client, &home.context, &home.namespace, now);
            Box::pin(running)
                .await
                .map_err(|error| KubectlError::RotateCa(Box::new(error)))
        }
        Command::LogLevel(args) => Box::pin(log_level::run(args, env)).await,
        Command::Migrate(migrate) => {
            let home = connect(&migrate.home, env).await?;
            Box::pin(migrate::run(migrate, home.client, &home.context)).await
        }
        Command::SupportBundle(args) => Box::pin(support_bundle::run(args, env, now)).await,
        Command::Version(args) => Ok(Box::pin(version::run(args, env)).await),
    }
}

async fn run_get(
    get: Get,
    env: &dyn Fn(&str) -> Option<String>,
    now: Timestamp,
    out: &mut dyn Write,
) -> Result<Printed, KubectlError> {
    let home = connect(&get.home, env).await?;
    let place = place(&get, &home);
    let clusters = ApiResource::erase::<EdgeCluster>(&());
    let kind = match get.kind {
        Kind::Clusters => &clusters,
        Kind::Tenants => &ApiResource::erase::<Tenant>(&()),
        Kind::Deployments => &ApiResource::erase::<KryptonDeployment>(&()),
    };
    if get.watch {
        watch::run(&get, kind, &place, &home, out).await?;
        return Ok(Printed::default());
    }
    let name = get.name.as_deref();
    let (client, context) = (home.client.clone(), home.context.as_str());
    let objects = list(client.clone(), kind, &place, name, context).await?;
    if let (Some(name), true) = (name, objects.is_empty()) {
        return Err(home.not_found(&kind.kind, name, &place));
    }
    let one = name
        .and_then(|_| objects.first())
        .filter(|_| get.kind == Kind::Tenants);
    if let (Some(tenant), None | Some(Output::Wide)) = (one, get.output) {
        let members = if tenants::is_summary(tenant) {
            list(client, &clusters, &Place::Cluster, None, context).await?
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

fn place(get: &Get, home: &Connection) -> Place {
    match (&get.namespace, get.kind) {
        (_, Kind::Clusters) => Place::Cluster,
        _ if get.all_namespaces => Place::Cluster,
        (Some(namespace), _) => Place::Namespace(namespace.clone()),
        (None, _) => Place::Namespace(home.namespace.clone()),
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
            .map_err(|error| explain(error, "list", kind, place, context))?;
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

fn explain(
    error: kube::Error,
    verb: &'static str,
    kind: &ApiResource,
    place: &Place,
    context: &str,
) -> KubectlError {
    let (context, plural) = (context.to_owned(), kind.plural.clone());
    let failed = |context, plural, reason| match verb {
        "list" | "watch" => KubectlError::List {
            context,
            plural,
            reason,
        },
        verb => KubectlError::Call {
            context,
            verb,
            plural,
            reason,
        },
    };
    let status = match &error {
        kube::Error::Api(status) => status,
        kube::Error::HyperError(_) | kube::Error::Service(_) => {
            let reason = layout::one_line(&reason_of(&error));
            return KubectlError::Unreachable { context, reason };
        }
        _ => return failed(context, plural, layout::one_line(&reason_of(&error))),
    };
    let message = layout::one_line(&status.message);
    match status.code {
        404 => KubectlError::NoSuchKind { context, plural },
        401 => KubectlError::Unauthorized { context, message },
        403 => {
            let place = place.in_words();
            let resource = match kind.group.as_str() {
                "" => plural.clone(),
                group => format!("{plural}.{group}"),
            };
            let missing = format!("the right to {verb} {resource} ({message})");
            KubectlError::Forbidden {
                context,
                verb,
                plural,
                place,
                missing,
            }
        }
        _ => failed(context, plural, message),
    }
}

fn printed(
    get: &Get,
    place: &Place,
    objects: Vec<Value>,
    now: Timestamp,
) -> Result<Printed, KubectlError> {
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
        _ => table_of(get, &objects, now).render(),
    };
    Ok(Printed {
        stdout,
        stderr: String::new(),
    })
}

fn table_of(get: &Get, objects: &[Value], now: Timestamp) -> Table {
    let wide = get.output == Some(Output::Wide);
    match get.kind {
        Kind::Clusters => clusters_table(objects, wide, now),
        Kind::Tenants => tenants_table(objects, wide, now),
        Kind::Deployments => deployments_table(objects, wide, now),
    }
}

fn encode(format: Output, items: Vec<Value>) -> Result<String, KubectlError> {
    let list = json!({ "apiVersion": "v1", "kind": "List", "metadata": {}, "items": items });
    encoded(format, &list)
}

/// One of several, which a reader can tell apart.
fn encode_one(format: Output, object: &Value) -> Result<String, KubectlError> {
    let mark = if format == Output::Yaml { "---\n" } else { "" };
    Ok(mark.to_owned() + &encoded(format, object)?)
}

fn encoded(format: Output, value: &Value) -> Result<String, KubectlError> {
    if format == Output::Json {
        let text = serde_json::to_string_pretty(value);
        return text
            .map(|text| text + "\n")
            .map_err(|error| KubectlError::Encode {
                format: "JSON",
                reason: error.to_string(),
            });
    }
    serde_saphyr::to_string(value).map_err(|error| KubectlError::Encode {
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
