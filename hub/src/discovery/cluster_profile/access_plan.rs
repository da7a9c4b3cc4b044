//! Plans the access to a profile's cluster: the program that issues the credential, its input, and the
//! cluster. Pure. Each plan is built from scratch to keep data of different profiles apart.

use std::collections::BTreeMap;

use krypton_types::conditions::reason;
use krypton_types::error_chain::chain;
use krypton_types::kubeconfig::{self, Policy};
use serde_json::{Map, Value, json};

use super::super::Unresolved;
use super::profile::Profile;
use super::provider_file::{
    AccessProvider, ApiVersion, ArgsPolicy, EnvsPolicy, ProviderFile, join_names,
};

/// Reserved by the client authentication API. The program receives it as `spec.cluster.config`.
const CONFIG_EXTENSION: &str = "client.authentication.k8s.io/exec";
const ARGS_EXTENSION: &str = "clusterprofiles.multicluster.x-k8s.io/exec/additional-args";
const ENVS_EXTENSION: &str = "clusterprofiles.multicluster.x-k8s.io/exec/additional-envs";

/// Access to a profile's cluster.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Plan {
    pub command: Command,
    /// As in a kubeconfig, without extensions.
    pub cluster: Map<String, Value>,
}

/// The program to run. Equal commands return the same credential.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Command {
    /// Name of the access provider.
    pub provider: String,
    pub program: String,
    pub args: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub api_version: ApiVersion,
    /// `KUBERNETES_EXEC_INFO`.
    pub info: String,
}

/// Omits arguments and variables, which may be secret.
impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Command")
            .field("provider", &self.provider)
            .field("program", &self.program)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plan")
            .field("command", &self.command)
            .finish_non_exhaustive()
    }
}

/// Builds the plan of a profile. `file` is `None` if the hub was started without one.
pub(super) fn plan(
    profile: &Profile,
    file: Option<&ProviderFile>,
    policy: &Policy,
) -> Result<Plan, Unresolved> {
    let origin = &profile.source.origin;
    if let Some(problem) = &profile.unready {
        let message = format!("{origin} is not ready; its cluster manager reports: {problem}");
        return Err(Unresolved::new(reason::PROFILE_NOT_READY, message));
    }
    let Some(file) = file else {
        let message = format!(
            "{origin} cannot be reached: this hub has no access providers; name a file of them with --clusterprofile-provider-file"
        );
        return Err(Unresolved::new(reason::PROVIDER_NOT_CONFIGURED, message));
    };
    let failed =
        |problem: &str| Unresolved::new(reason::ACCESS_FAILED, format!("{origin}: {problem}"));
    let clusters = match &profile.access {
        Ok(clusters) => clusters,
        Err(problem) => return Err(failed(problem)),
    };
    let chosen = file
        .providers
        .iter()
        .find_map(|provider| Some((provider, clusters.get(&provider.name)?)));
    let Some((provider, cluster)) = chosen else {
        let message = format!(
            "{origin}: none of its access providers ({}) is in the hub's provider file ({}); add one there",
            join_names(clusters.keys()),
            file.names()
        );
        return Err(Unresolved::new(reason::MULTICLUSTER_DISABLED, message));
    };
    build_plan(provider, cluster, policy)
        .map_err(|problem| failed(&format!("access provider {}: {problem}", provider.name)))
}

fn build_plan(
    provider: &AccessProvider,
    profile_cluster: &Map<String, Value>,
    policy: &Policy,
) -> Result<Plan, String> {
    let mut cluster = profile_cluster.clone();
    let extensions = cluster.remove("extensions");
    let extension = |name| extension(extensions.as_ref(), name);
    // The sanitizer checks the cluster before a program runs for it. The credential is still unknown: the
    // user is a placeholder without data of the profile.
    let user = json!({ "token": "t" });
    kubeconfig::parse(document(&cluster, &user).as_bytes(), policy)
        .map_err(|error| chain(&error).replace("clusters[0].", ""))?;

    let exec = &provider.exec;
    let mut args = exec.args.clone();
    if provider.args == ArgsPolicy::Append {
        args.extend(additional_args(extension(ARGS_EXTENSION)?)?);
    }
    let mut env: BTreeMap<String, String> = exec.env.iter().cloned().collect();
    if provider.envs != EnvsPolicy::Ignore {
        for (name, value) in additional_envs(extension(ENVS_EXTENSION)?)? {
            if provider.envs == EnvsPolicy::Replace || !env.contains_key(&name) {
                env.insert(name, value);
            }
        }
    }
    let config = extension(CONFIG_EXTENSION)?;
    let shown_cluster = exec.provide_cluster_info.then_some(&cluster);
    let info = exec_info(exec.api_version, shown_cluster, config);
    Ok(Plan {
        command: Command {
            provider: provider.name.clone(),
            program: exec.command.clone(),
            args,
            env,
            api_version: exec.api_version,
            info,
        },
        cluster,
    })
}

/// Builds a kubeconfig document as input of the sanitizer.
pub(super) fn document(cluster: &Map<String, Value>, user: &Value) -> String {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "member", "cluster": cluster }],
        "users": [{ "name": "member", "user": user }],
        "contexts": [{ "name": "member", "context": { "cluster": "member", "user": "member" } }],
        "current-context": "member",
    })
    .to_string()
}

fn exec_info(
    version: ApiVersion,
    cluster: Option<&Map<String, Value>>,
    config: Option<&Value>,
) -> String {
    let mut spec = Map::new();
    // The hub cannot answer a prompt.
    spec.insert("interactive".to_owned(), false.into());
    if let Some(cluster) = cluster {
        let keys = [
            "server",
            "tls-server-name",
            "insecure-skip-tls-verify",
            "certificate-authority-data",
            "proxy-url",
            "disable-compression",
        ];
        let mut info: Map<String, Value> = keys
            .into_iter()
            .filter_map(|key| Some((key.to_owned(), cluster.get(key)?.clone())))
            .collect();
        if let Some(config) = config {
            info.insert("config".to_owned(), config.clone());
        }
        spec.insert("cluster".to_owned(), Value::Object(info));
    }
    json!({ "apiVersion": version.as_str(), "kind": "ExecCredential", "spec": spec }).to_string()
}

/// Null counts as missing.
fn extension<'a>(extensions: Option<&'a Value>, name: &str) -> Result<Option<&'a Value>, String> {
    let items = match extensions {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(items)) => items,
        Some(_) => return Err("cluster.extensions must be a list".to_owned()),
    };
    let mut matching = items
        .iter()
        .filter(|item| item.get("name").and_then(Value::as_str) == Some(name));
    let first = matching.next();
    if matching.next().is_some() {
        return Err(format!("the extension {name} occurs twice"));
    }
    let value = first.and_then(|item| item.get("extension"));
    Ok(value.filter(|value| !value.is_null()))
}

fn additional_args(extension: Option<&Value>) -> Result<Vec<String>, String> {
    let not_a_list = || format!("the extension {ARGS_EXTENSION} must be a list of strings");
    match extension {
        None => Ok(Vec::new()),
        Some(Value::Array(items)) => items
            .iter()
            .map(|item| text(item).ok_or_else(not_a_list))
            .collect(),
        Some(_) => Err(not_a_list()),
    }
}

fn additional_envs(extension: Option<&Value>) -> Result<Vec<(String, String)>, String> {
    let not_a_map = || format!("the extension {ENVS_EXTENSION} must be a map of strings");
    let map = match extension {
        None => return Ok(Vec::new()),
        Some(Value::Object(map)) => map,
        Some(_) => return Err(not_a_map()),
    };
    let mut envs = Vec::new();
    for (name, value) in map {
        if !is_env_name(name) {
            return Err(format!(
                "the extension {ENVS_EXTENSION} has an invalid variable name; use letters, digits and _"
            ));
        }
        if selects_program(name) {
            return Err(format!(
                "the extension {ENVS_EXTENSION} may not set {name}, because it changes which program runs; set it in the hub's provider file"
            ));
        }
        let value = match value {
            Value::Null => String::new(),
            value => text(value).ok_or_else(not_a_map)?,
        };
        envs.push((name.clone(), value));
    }
    Ok(envs)
}

/// Reads YAML's plain scalars as text, as the Inventory API does.
fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) if !text.contains('\0') => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(flag) => Some(flag.to_string()),
        _ => None,
    }
}

fn is_env_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// Whether a variable selects the code that runs. A profile may set values for the hub's program, but must
/// not choose the program.
fn selects_program(name: &str) -> bool {
    [
        "PATH",
        "HOME",
        "TMPDIR",
        "IFS",
        "ENV",
        "BASH_ENV",
        "KUBECONFIG",
    ]
    .contains(&name)
        || ["LD_", "KUBERNETES_", "GIT_", "PYTHON", "NODE_", "GCONV_"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::super::profile;
    use super::super::provider_file::Exec;
    use super::*;

    const CA: &str = "certificate-authority-data";

    fn provider(name: &str) -> AccessProvider {
        AccessProvider {
            name: name.to_owned(),
            exec: Exec {
                api_version: ApiVersion::V1,
                command: format!("/plugins/{name}"),
                args: vec!["token".to_owned()],
                env: vec![("A".to_owned(), "file".to_owned())],
                provide_cluster_info: true,
            },
            args: ArgsPolicy::Append,
            envs: EnvsPolicy::Replace,
        }
    }

    fn file(providers: Vec<AccessProvider>) -> ProviderFile {
        ProviderFile { providers }
    }

    fn profile_with_access(name: &str, access: Value) -> Profile {
        let status = json!({
            "conditions": [{"type": "ControlPlaneHealthy", "status": "True"}],
            "accessProviders": access,
        });
        Profile::read(&profile::object(name, status)).unwrap()
    }

    fn ready_profile(cluster: Value) -> Profile {
        profile_with_access("edge-1", json!([{"name": "a", "cluster": cluster}]))
    }

    fn plan_with(profile: &Profile, provider: AccessProvider) -> Result<Plan, Unresolved> {
        plan(profile, Some(&file(vec![provider])), &Policy::default())
    }

    fn profile_with_extensions(extensions: Value) -> Profile {
        ready_profile(json!({"server": "https://a", "extensions": extensions}))
    }

    fn exec_info_of(plan: &Plan) -> Value {
        serde_json::from_str(&plan.command.info).unwrap()
    }

    #[test]
    fn missing_access_is_reported_with_its_cause() {
        let unready = Profile::read(&profile::object("edge-1", Value::Null)).unwrap();
        let ready = ready_profile(json!({"server": "https://a"}));
        let no_access = profile_with_access("edge-1", json!([]));
        let (of_b, empty) = (file(vec![provider("b")]), file(vec![]));
        let flag = "--clusterprofile-provider-file";
        for (profile, file, reason, cause) in [
            (
                &unready,
                Some(&of_b),
                "ClusterProfileNotReady",
                "ControlPlaneHealthy",
            ),
            (&ready, None, "AccessProviderNotConfigured", flag),
            (&ready, Some(&of_b), "MulticlusterDisabled", "(a)"),
            (&ready, Some(&of_b), "MulticlusterDisabled", "(b)"),
            (&no_access, Some(&empty), "MulticlusterDisabled", "(none)"),
        ] {
            let problem = plan(profile, file, &Policy::default()).unwrap_err();
            assert_eq!(problem.reason, reason);
            for part in ["ClusterProfile fleet/edge-1", cause] {
                assert!(problem.message.contains(part), "{problem:?}");
            }
        }
    }

    #[test]
    fn the_order_of_the_file_decides_between_two() {
        let profile = profile_with_access(
            "edge-1",
            json!([
                {"name": "a", "cluster": {"server": "https://a"}},
                {"name": "b", "cluster": {"server": "https://b"}},
            ]),
        );
        let chosen = |providers| {
            plan(&profile, Some(&file(providers)), &Policy::default())
                .unwrap()
                .command
                .provider
        };
        assert_eq!(chosen(vec![provider("a"), provider("b")]), "a");
        assert_eq!(
            chosen(vec![provider("c"), provider("b"), provider("a")]),
            "b"
        );
    }

    #[test]
    fn profile_cluster_must_pass_sanitizer() {
        for (cluster, expected) in [
            (json!({}), "cluster.server is not set"),
            (
                json!({"server": "http://a"}),
                "cluster.server must start with https://",
            ),
            (
                json!({"server": "https://a", "insecure-skip-tls-verify": true}),
                "cluster.insecure-skip-tls-verify is not allowed",
            ),
            (
                json!({"server": "https://a", "certificate-authority": "/etc/passwd"}),
                "cluster.certificate-authority is not allowed",
            ),
            (
                json!({"server": "https://a", "tokenFile": "/t"}),
                "cluster.tokenFile is not a known field",
            ),
        ] {
            let problem = plan_with(&ready_profile(cluster.clone()), provider("a")).unwrap_err();
            assert_eq!(problem.reason, "AccessProviderFailed");
            assert!(problem.message.contains(expected), "{cluster}: {problem:?}");
        }
        let lab = Policy {
            allow_insecure_tls: true,
            ..Policy::default()
        };
        let profile =
            ready_profile(json!({"server": "https://a", "insecure-skip-tls-verify": true}));
        assert!(plan(&profile, Some(&file(vec![provider("a")])), &lab).is_ok());
    }

    #[test]
    fn exec_gets_cluster_info_only_if_configured() {
        let profile = ready_profile(json!({
            "server": "https://a",
            "tls-server-name": "b",
            "extensions": [{"name": CONFIG_EXTENSION, "extension": {"clusterName": "x"}}],
        }));
        let cluster_info = exec_info_of(&plan_with(&profile, provider("a")).unwrap());
        assert_eq!(
            cluster_info,
            json!({
                "apiVersion": "client.authentication.k8s.io/v1",
                "kind": "ExecCredential",
                "spec": {"interactive": false, "cluster": {
                    "server": "https://a", "tls-server-name": "b", "config": {"clusterName": "x"},
                }},
            })
        );
        assert_eq!(cluster_info["spec"]["cluster"].get(CA), None);
        let mut quiet = provider("a");
        quiet.exec.provide_cluster_info = false;
        quiet.exec.api_version = ApiVersion::V1beta1;
        let plan = plan_with(&profile, quiet).unwrap();
        assert_eq!(exec_info_of(&plan)["spec"], json!({"interactive": false}));
        assert_eq!(
            exec_info_of(&plan)["apiVersion"],
            "client.authentication.k8s.io/v1beta1"
        );
        // The kubeconfig still contains the server name.
        assert_eq!(plan.cluster["tls-server-name"], "b");
        assert!(!plan.cluster.contains_key("extensions"));
    }

    #[test]
    fn profile_args_and_envs_follow_policy() {
        let profile = profile_with_extensions(json!([
            {"name": ARGS_EXTENSION, "extension": ["--audience", 7]},
            {"name": ENVS_EXTENSION, "extension": {"A": "profile", "B": true, "C": null}},
        ]));
        let env = |envs| {
            let provider = AccessProvider {
                envs,
                ..provider("a")
            };
            let command = plan_with(&profile, provider).unwrap().command;
            let get = |name: &str| command.env.get(name).cloned().unwrap_or("-".to_owned());
            [get("A"), get("B"), get("C")]
        };
        assert_eq!(env(EnvsPolicy::Ignore), ["file", "-", "-"]);
        assert_eq!(env(EnvsPolicy::AppendIfNotExists), ["file", "true", ""]);
        assert_eq!(env(EnvsPolicy::Replace), ["profile", "true", ""]);
        let args = |args| {
            let provider = AccessProvider {
                args,
                ..provider("a")
            };
            plan_with(&profile, provider).unwrap().command.args
        };
        assert_eq!(args(ArgsPolicy::Ignore), ["token"]);
        assert_eq!(args(ArgsPolicy::Append), ["token", "--audience", "7"]);
    }

    #[test]
    fn profile_additions_do_not_leak_between_profiles() {
        let profile_named = |name: &str| {
            let mut profile = profile_with_extensions(json!([
                {"name": ARGS_EXTENSION, "extension": [name]},
                {"name": ENVS_EXTENSION, "extension": {name: name}},
            ]));
            profile.source.origin.name = name.to_owned();
            profile
        };
        let file = file(vec![provider("a")]);
        for _ in 0..2 {
            for name in ["one", "two"] {
                let command = plan(&profile_named(name), Some(&file), &Policy::default())
                    .unwrap()
                    .command;
                assert_eq!(command.args, ["token", name]);
                let names: Vec<&String> = command.env.keys().collect();
                assert_eq!(names, ["A", name]);
            }
        }
        assert_eq!(file.providers, [provider("a")]);
    }

    #[test]
    fn null_and_empty_extensions_are_ignored() {
        let plain = plan_with(
            &ready_profile(json!({"server": "https://a"})),
            provider("a"),
        )
        .unwrap();
        for extensions in [
            Value::Null,
            json!([]),
            json!([{"name": ARGS_EXTENSION, "extension": null}, {"name": ENVS_EXTENSION, "extension": null}, {"name": CONFIG_EXTENSION, "extension": null}]),
            json!([{"name": ENVS_EXTENSION, "extension": {}}, {"name": "other", "extension": 1}]),
        ] {
            assert_eq!(
                plan_with(&profile_with_extensions(extensions), provider("a")).unwrap(),
                plain
            );
        }
    }

    #[test]
    fn malformed_extensions_and_unsafe_variables_are_rejected() {
        let args = |value: Value| json!([{"name": ARGS_EXTENSION, "extension": value}]);
        let envs = |value: Value| json!([{"name": ENVS_EXTENSION, "extension": value}]);
        let empty_args = json!({"name": ARGS_EXTENSION, "extension": []});
        let twice = json!([empty_args, empty_args]);
        for (extensions, expected) in [
            (json!({}), "extensions must be a list"),
            (args(json!({})), "additional-args must be a list"),
            (args(json!([[]])), "additional-args must be a list"),
            (envs(json!(["A"])), "additional-envs must be a map"),
            (envs(json!({"A": {}})), "additional-envs must be a map"),
            (envs(json!({"A=B": ""})), "invalid variable name"),
            (envs(json!({"PATH": "/tmp"})), "may not set PATH"),
            (envs(json!({"LD_PRELOAD": "x"})), "may not set LD_PRELOAD"),
            (envs(json!({"KUBERNETES_EXEC_INFO": "x"})), "may not set"),
            (twice, "twice"),
        ] {
            let profile = profile_with_extensions(extensions);
            let problem = plan_with(&profile, provider("a")).unwrap_err();
            assert_eq!(problem.reason, "AccessProviderFailed");
            assert!(problem.message.contains(expected), "{problem:?}");
        }
    }
}
