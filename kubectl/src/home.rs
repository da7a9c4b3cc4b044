//! Connects to the cluster of the user's kubeconfig, usually the home cluster.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use krypton_runtime::access::{LocalSource, environment_proxy, local, new_client};
use krypton_runtime::args::go_values::parse_duration;
use krypton_runtime::lease::SYSTEM_NAMESPACE;
use krypton_types::names::namespace_name;
use kube::config::Kubeconfig;
use kube::{Client, Config};

use crate::error::KubectlError;

const USER_AGENT: &str = concat!("kubectl-krypton/", env!("CARGO_PKG_VERSION"));
/// Namespace of the hub in the documentation.
pub(crate) const DEFAULT_HUB_NAMESPACE: &str = "krypton";

/// Reads an environment variable.
pub(crate) type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Selects the cluster, and the namespaces there.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct TargetArgs {
    /// Kubeconfig file; by default KUBECONFIG, then .kube/config in HOME
    #[arg(long, value_name = "FILE", global = true)]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig; by default its current-context
    #[arg(long, value_name = "CONTEXT", global = true)]
    pub(crate) context: Option<String>,
    /// Act as this user, as kubectl does
    #[arg(long = "as", value_name = "USER", global = true)]
    pub(crate) as_user: Option<String>,
    /// Act as a member of this group; repeatable, needs --as
    #[arg(long = "as-group", value_name = "GROUP", global = true)]
    pub(crate) as_groups: Vec<String>,
    /// Namespace of the objects, Helm release or agent in the command. By default, it is that of the context; for
    /// migrate and check all namespaces, for an agent krypton-system
    #[arg(short, long, value_name = "NAMESPACE", value_parser = namespace_name, global = true)]
    pub(crate) namespace: Option<String>,
    /// Namespace of the hub; by default krypton-system, else krypton, else that of the context
    #[arg(long, value_name = "NAMESPACE", value_parser = namespace_name, global = true)]
    pub(crate) hub_namespace: Option<String>,
    /// Deadline of each request to an API server, as 5s or 2m; 0 disables it. By default 10s or 30s, depending on the
    /// request
    #[arg(long, value_name = "DURATION", value_parser = parse_request_timeout, global = true)]
    pub(crate) request_timeout: Option<Duration>,
}

/// Parses a duration, or a number of seconds as kubectl does.
fn parse_request_timeout(text: &str) -> Result<Duration, &'static str> {
    let timeout = match text.parse() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => parse_duration(text),
    };
    match timeout {
        Some(timeout) if timeout.is_zero() => Ok(Duration::MAX),
        Some(timeout) => Ok(timeout),
        None => Err("write a duration, as 5s or 2m"),
    }
}

impl TargetArgs {
    /// Fails if the user named a namespace of objects for a command that needs only the hub's.
    pub(crate) fn reject_namespace(&self) -> Result<(), KubectlError> {
        match self.namespace {
            Some(_) => Err(KubectlError::usage(
                "this command names no object in a namespace, so it takes no --namespace; name the hub's namespace with --hub-namespace",
            )),
            None => Ok(()),
        }
    }

    /// Fails if the user selected a cluster or a namespace for a command that creates its own cluster.
    pub(crate) fn reject_cluster(&self) -> Result<(), KubectlError> {
        let flags = [
            ("--kubeconfig", self.kubeconfig.is_some()),
            ("--context", self.context.is_some()),
            ("--as", self.as_user.is_some()),
            ("--as-group", !self.as_groups.is_empty()),
            ("--namespace", self.namespace.is_some()),
            ("--hub-namespace", self.hub_namespace.is_some()),
        ];
        match flags.into_iter().find(|(_, is_named)| *is_named) {
            Some((flag, _)) => Err(KubectlError::usage(format!(
                "this command creates its own cluster, so it takes no {flag}; name the cluster with --name"
            ))),
            None => Ok(()),
        }
    }
}

/// The cluster of a command.
pub(crate) struct Target<'a> {
    pub(crate) args: TargetArgs,
    pub(crate) env: Env<'a>,
}

/// Connection to the selected cluster.
pub struct Connection {
    pub(crate) client: Client,
    pub(crate) context: String,
    /// Namespace of the context.
    pub(crate) namespace: String,
    /// Namespace of the hub, if the user named one.
    pub(crate) hub_namespace: Option<String>,
    /// Deadline of each request, if the user named one.
    pub(crate) request_timeout: Option<Duration>,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Connection").field(&self.context).finish()
    }
}

impl Connection {
    /// `context` names the cluster in messages.
    pub fn new(client: Client, context: impl Into<String>) -> Self {
        let namespace = client.default_namespace().to_owned();
        let context = context.into();
        Self {
            client,
            context,
            namespace,
            hub_namespace: None,
            request_timeout: None,
        }
    }

    /// The namespace of objects: the one that the user named, or that of the context.
    pub(crate) fn objects_namespace(&self, named: Option<&str>) -> String {
        named.unwrap_or(&self.namespace).to_owned()
    }

    /// Namespaces that may contain the hub: the one that the user named, or the usual ones.
    pub(crate) fn hub_namespaces(&self) -> Vec<String> {
        self.program_namespaces(self.hub_namespace.as_deref())
    }

    /// Namespaces that may contain a hub or agent: the named one, or the usual ones.
    pub(crate) fn program_namespaces(&self, named: Option<&str>) -> Vec<String> {
        if let Some(named) = named {
            return vec![named.to_owned()];
        }
        let mut namespaces = vec![
            SYSTEM_NAMESPACE.to_owned(),
            DEFAULT_HUB_NAMESPACE.to_owned(),
        ];
        if !namespaces.contains(&self.namespace) {
            namespaces.push(self.namespace.clone());
        }
        namespaces
    }

    /// Like [`search`] for an object of the hub. A missing object is an error.
    pub(crate) async fn search_hub<T>(
        &self,
        object: &str,
        namespaces: &[String],
        read: impl AsyncFn(&str) -> Result<Option<T>, KubectlError>,
    ) -> Result<(String, T), KubectlError> {
        if let Some(found) = search(namespaces, read).await? {
            return Ok(found);
        }
        let scope = match namespaces {
            [one] => format!("the namespace {one}"),
            several => format!("the namespaces {}", several.join(" and ")),
        };
        Err(KubectlError::NotFound(format!(
            "the cluster {:?} has no {object} in {scope}, so it has no hub of Krypton that agents can join; name the hub's namespace with --hub-namespace, choose its home cluster with --context or --kubeconfig, or start the hub with --listen",
            self.context
        )))
    }
}

/// Returns the first result of `read` in these namespaces, with its namespace. A namespace that the user may not read
/// does not end the search.
pub(crate) async fn search<T>(
    namespaces: &[String],
    read: impl AsyncFn(&str) -> Result<Option<T>, KubectlError>,
) -> Result<Option<(String, T)>, KubectlError> {
    let mut forbidden = None;
    for namespace in namespaces {
        match read(namespace).await {
            Ok(Some(object)) => return Ok(Some((namespace.clone(), object))),
            Ok(None) => {}
            Err(error) if error.code() == Some(403) => {
                forbidden.get_or_insert(error);
            }
            Err(error) => return Err(error),
        }
    }
    forbidden.map_or(Ok(None), Err)
}

impl Target<'_> {
    pub(crate) async fn connect(&self) -> Result<Connection, KubectlError> {
        let args = &self.args;
        let source = local_source(args.kubeconfig.as_deref(), self.env);
        let has_kubeconfig = source.flag.is_some() || !source.kubeconfig_variable.is_empty();
        if let Some(context) = &args.context
            && !has_kubeconfig
        {
            // The account of a pod has no contexts.
            return Err(KubectlError::usage(format_args!(
                "there is no kubeconfig with the context {context:?}; set --kubeconfig or KUBECONFIG"
            )));
        }
        if args.as_user.is_none() && !args.as_groups.is_empty() {
            return Err(KubectlError::usage("--as-group needs --as USER"));
        }
        let lookup = Box::pin(local(&source, args.context.as_deref(), Config::incluster));
        let mut located = lookup.await.map_err(KubectlError::Kubeconfig)?;
        if has_kubeconfig && located.config.proxy_url.is_none() {
            let proxy = environment_proxy(&located.config.cluster_url, self.env);
            located.config.proxy_url = proxy.map_err(KubectlError::Kubeconfig)?;
        }
        if args.as_user.is_some() {
            let user = &mut located.config.auth_info;
            user.impersonate.clone_from(&args.as_user);
            if !args.as_groups.is_empty() {
                user.impersonate_groups = Some(args.as_groups.clone());
            }
        }
        let client = new_client(located.config, USER_AGENT).map_err(KubectlError::Client)?;
        Ok(Connection {
            hub_namespace: args.hub_namespace.clone(),
            request_timeout: args.request_timeout,
            ..Connection::new(client, located.context_name)
        })
    }

    /// A cluster with another context of the kubeconfig.
    pub(crate) fn with_context(&self, context: &str) -> Self {
        Self {
            args: TargetArgs {
                context: Some(context.to_owned()),
                ..self.args.clone()
            },
            env: self.env,
        }
    }
}

/// The contexts of the user's kubeconfigs.
pub(crate) fn contexts(env: Env<'_>) -> Vec<String> {
    let mut files = kubeconfig_variable(env);
    if files.is_empty() {
        files.extend(default_kubeconfig(env));
    }
    let configs = files.iter().filter_map(|it| Kubeconfig::read_from(it).ok());
    let contexts = configs.flat_map(|config| config.contexts);
    contexts.map(|context| context.name).collect()
}

/// Returns the kubeconfig of the user, which precedes the account of this pod, as for kubectl and Helm.
fn local_source(flag: Option<&Path>, env: Env<'_>) -> LocalSource {
    let kubeconfig_variable = kubeconfig_variable(env);
    let user_file =
        default_kubeconfig(env).filter(|path| kubeconfig_variable.is_empty() && path.is_file());
    LocalSource {
        flag: flag.map(Path::to_owned).or(user_file),
        kubeconfig_variable,
        user_file: None,
    }
}

fn kubeconfig_variable(env: Env<'_>) -> Vec<PathBuf> {
    let list = env("KUBECONFIG").unwrap_or_default();
    let paths = std::env::split_paths(&list);
    paths.filter(|path| !path.as_os_str().is_empty()).collect()
}

fn default_kubeconfig(env: Env<'_>) -> Option<PathBuf> {
    // Windows sets the second one.
    let home = env("HOME").or_else(|| env("USERPROFILE"));
    home.map(|home| PathBuf::from(home).join(".kube/config"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubeconfig_of_user_precedes_account_of_pod() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join(".kube");
        let flag = |variable: &str| {
            let env = |name: &str| match name {
                "HOME" => home.path().to_str().map(str::to_owned),
                "KUBECONFIG" => Some(variable.to_owned()),
                _ => None,
            };
            local_source(None, &env).flag
        };
        assert_eq!(flag(""), None);
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("config"), "").unwrap();
        assert_eq!(flag(""), Some(folder.join("config")));
        assert_eq!(flag("/another"), None);
    }

    #[test]
    fn request_timeout_accepts_seconds_and_durations() {
        for (text, expected) in [
            ("5", Some(Duration::from_secs(5))),
            ("1m30s", Some(Duration::from_secs(90))),
            ("0", Some(Duration::MAX)),
            ("0s", Some(Duration::MAX)),
            ("soon", None),
            ("-1", None),
            ("", None),
        ] {
            assert_eq!(parse_request_timeout(text).ok(), expected, "{text}");
        }
    }
}
