//! How each setting is found: variable, flag, default, and the few that have an order of their own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use krypton_reconciler::plan::{HISTORY, Remediation};
use krypton_runtime::admin::is_loopback;
use krypton_runtime::telemetry::LogFormat;
use krypton_runtime::telemetry::traces::{NoEndpoint, OtlpEndpoint};
use krypton_types::desired::drift::DriftPolicy;
use krypton_types::desired::handling::Handling;
use krypton_types::desired::lockdown::Lockdown;
use krypton_types::desired::namespaces::{ConfigurationError, NamespaceConfiguration};
use krypton_types::join_bundle::split_address;
use krypton_types::kubeconfig::Policy;
use krypton_types::names;
use krypton_types::redact::{NO_URL, has_userinfo, url_shown};

use crate::chart::values::{NotASource, Source};

use super::{
    BindAddress, ChartSettings, Discovery, Flags, HelmSettings, HomeChoice, HomeSource,
    LocalSource, NotABindAddress, Origin, OwnPod, ProviderKind, ServiceAccount, Settings,
    SettingsError, parse_bool, parse_duration, table,
};

const CHECK_INTERVAL_DEFAULT: Duration = Duration::from_secs(60);
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);
/// A hub that is killed is followed after it.
const LONGEST_LEAD: Duration = Duration::from_secs(60);
const MOST_HELM_RUNS: usize = 64;
const SHOWN_CHARS: usize = 120;

pub(super) fn resolve(
    flags: &Flags,
    env: &dyn Fn(&str) -> Option<String>,
    service_account_namespace: Option<String>,
) -> Result<Settings, SettingsError> {
    let mut inputs = Inputs {
        env,
        notes: Vec::new(),
    };
    let namespace = inputs.namespace(flags, service_account_namespace)?;
    let home = inputs.home(flags, &namespace)?;
    let [listen, metrics, health, debug] = inputs.bind_addresses(flags)?;
    let (log_format, log_level) = inputs.log(flags)?;
    let helm = inputs.helm(flags, &namespace)?;
    let discovery = inputs.discovery(flags, &namespace)?;
    inputs.refuse_foreign_helm_driver()?;
    inputs.note_flags_without_effect(flags)?;

    Ok(Settings {
        namespace,
        watch_namespaces: inputs.watch_namespaces(flags)?,
        home,
        ensure_watch_crds: inputs.ensure_watch_crds(flags)?,
        discovery,
        self_cluster: inputs.boolean("self-cluster", &flags.self_cluster)?,
        kubeconfig_policy: inputs.kubeconfig_policy(flags)?,
        listen,
        advertise: inputs.advertise(flags)?,
        proxy_grace: inputs.duration("proxy-grace", &flags.proxy_grace)?,
        lead: inputs.lead(flags)?,
        chart: inputs.chart(flags)?,
        chart_values_file: inputs.path("chart-values-file", &flags.chart_values_file),
        chart_values_from: inputs.chart_values_from(flags)?,
        tenant_values: inputs.boolean("tenant-values", &flags.tenant_values)?,
        place_tenants: inputs.boolean("place-tenants", &flags.place_tenants)?,
        drift: inputs.drift(flags)?,
        chart_crds: {
            let given = inputs.text("chart-crds", &flags.chart_crds);
            let policy = given.text.parse();
            policy.map_err(|_| given.invalid("a policy", "write skip, create or create-replace"))?
        },
        handling: inputs.handling(flags)?,
        lockdown: inputs.lockdown(flags)?,
        namespaces: inputs.namespaces(flags)?,
        helm,
        retry_max: inputs.duration("retry-max", &flags.retry_max)?,
        check_interval: inputs.check_interval(),
        metrics_bind_address: metrics,
        health_probe_bind_address: health,
        debug_bind_address: debug,
        log_format,
        log_level,
        otlp_endpoint: inputs.otlp_endpoint(flags)?,
        reporting_instance: inputs
            .variable("POD_NAME")
            .or_else(|| inputs.variable("HOSTNAME")),
        pod: inputs.pod(),
        notes: inputs.notes,
    })
}

/// A value and where it came from.
struct Given {
    text: String,
    origin: Origin,
}

impl Given {
    /// What is between commas, without blanks and empty ones.
    fn items(&self) -> impl Iterator<Item = Self> + '_ {
        let items = self.text.split(',').map(str::trim);
        items.filter(|item| !item.is_empty()).map(|item| Self {
            text: item.to_owned(),
            origin: self.origin,
        })
    }

    /// What is between commas, as `KEY=VALUE`; `\,` is a comma and `\\` a backslash.
    fn pairs(&self) -> Result<BTreeMap<String, String>, SettingsError> {
        let (mut items, mut item) = (Vec::new(), String::new());
        let mut rest = self.text.chars();
        while let Some(next) = rest.next() {
            match next {
                '\\' => item.extend(rest.next()),
                ',' => items.push(std::mem::take(&mut item)),
                other => item.push(other),
            }
        }
        items.push(item);
        let mut pairs = BTreeMap::new();
        for item in items.iter().map(|item| item.trim()) {
            if item.is_empty() {
                continue;
            }
            let (key, value) = item.split_once('=').ok_or_else(|| {
                self.invalid(
                    "a list of KEY=VALUE",
                    "write KEY=VALUE, separated by commas",
                )
            })?;
            pairs.insert(key.to_owned(), value.to_owned());
        }
        Ok(pairs)
    }

    /// `None`, which means all, when it is empty or `*`.
    fn namespaces(&self) -> Result<Option<BTreeSet<String>>, SettingsError> {
        if self.text.trim() == "*" {
            return Ok(None);
        }
        let names: BTreeSet<String> = self
            .items()
            .map(Self::namespace_name)
            .collect::<Result<_, _>>()?;
        Ok((!names.is_empty()).then_some(names))
    }

    fn invalid(&self, class: &'static str, remedy: &'static str) -> SettingsError {
        let value = self.text.chars().take(SHOWN_CHARS).collect();
        SettingsError::Invalid {
            origin: self.origin,
            value,
            class,
            remedy,
        }
    }

    fn namespace_name(self) -> Result<String, SettingsError> {
        names::namespace_name(&self.text).map_err(|remedy| self.invalid("a namespace name", remedy))
    }

    fn data_key(self) -> Result<String, SettingsError> {
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if !self.text.is_empty() && self.text.len() <= 253 && self.text.chars().all(legal) {
            return Ok(self.text);
        }
        Err(self.invalid(
            "a key of a Secret",
            "write letters, digits, '-', '_' or '.'",
        ))
    }
}

/// An empty value is one that was not given, as with Go's `os.Getenv`.
fn non_empty(text: Option<String>) -> Option<String> {
    text.filter(|text| !text.is_empty())
}

struct Inputs<'a> {
    env: &'a dyn Fn(&str) -> Option<String>,
    notes: Vec<String>,
}

impl Inputs<'_> {
    fn variable(&self, name: &str) -> Option<String> {
        non_empty((self.env)(name))
    }

    fn pod(&self) -> Option<OwnPod> {
        Some(OwnPod {
            namespace: self.variable("KRYPTON_POD_NAMESPACE")?,
            name: self.variable("POD_NAME")?,
            uid: self.variable("POD_UID")?,
        })
    }

    /// Variable, flag, default; a flag given as empty text is given.
    fn text(&mut self, name: &'static str, flag: &Option<String>) -> Given {
        let row = table::row_of(name).expect("each flag has a row, as a test of the table shows");
        for variable in row.env {
            let Some(text) = self.variable(variable) else {
                continue;
            };
            if flag.as_ref().is_some_and(|flag| *flag != text) {
                self.notes
                    .push(format!("variable {variable} overrides flag --{name}"));
            }
            return Given {
                text,
                origin: Origin::Variable(variable),
            };
        }
        match flag {
            Some(text) => Given {
                text: text.clone(),
                origin: Origin::Flag(name),
            },
            None => Given {
                text: row.default.to_owned(),
                origin: Origin::Default(name),
            },
        }
    }

    fn path(&mut self, name: &'static str, flag: &Option<String>) -> Option<PathBuf> {
        non_empty(Some(self.text(name, flag).text)).map(PathBuf::from)
    }

    fn boolean(
        &mut self,
        name: &'static str,
        flag: &Option<String>,
    ) -> Result<bool, SettingsError> {
        let given = self.text(name, flag);
        parse_bool(&given.text).ok_or_else(|| given.invalid("a bool", "write true or false"))
    }

    fn duration(
        &mut self,
        name: &'static str,
        flag: &Option<String>,
    ) -> Result<Duration, SettingsError> {
        let given = self.text(name, flag);
        parse_duration(&given.text)
            .filter(|duration| (Duration::from_secs(1)..=LONGEST).contains(duration))
            .ok_or_else(|| {
                given.invalid(
                    "a duration from 1s to 24h",
                    "write numbers with units, as 90s, 3m or 1h30m",
                )
            })
    }

    fn namespace(
        &mut self,
        flags: &Flags,
        service_account: Option<String>,
    ) -> Result<String, SettingsError> {
        let explicit = non_empty(flags.namespace.clone());
        let given = self.text("namespace", &explicit);
        if given.origin != Origin::Default("namespace") {
            return given.namespace_name();
        }
        // The file is written by the kubelet, so it names a namespace.
        let from_file = non_empty(service_account.map(|text| text.trim().to_owned()));
        Ok(from_file.unwrap_or_else(|| "default".to_owned()))
    }

    fn watch_namespaces(
        &mut self,
        flags: &Flags,
    ) -> Result<Option<BTreeSet<String>>, SettingsError> {
        let given = self.text("watch-namespaces", &flags.watch_namespaces);
        given.namespaces()
    }

    fn home(&mut self, flags: &Flags, namespace: &str) -> Result<HomeSource, SettingsError> {
        let secret = self.text("watch-kubeconfig-secret", &flags.watch_kubeconfig_secret);
        let file = self.path("watch-kubeconfig", &flags.watch_kubeconfig);
        let choice = if !secret.text.is_empty() {
            if !names::is_dns_subdomain(&secret.text) {
                return Err(secret.invalid(
                    "the name of a Secret",
                    "write the name alone; its namespace goes to --watch-kubeconfig-secret-namespace",
                ));
            }
            if file.is_some() {
                self.notes.push(format!(
                    "{} is used, the watch kubeconfig file is not",
                    secret.origin
                ));
            }
            let flag = &flags.watch_kubeconfig_secret_namespace;
            let in_namespace = self.text("watch-kubeconfig-secret-namespace", flag);
            let in_namespace = if in_namespace.text.is_empty() {
                namespace.to_owned()
            } else {
                in_namespace.namespace_name()?
            };
            let flag = non_empty(flags.watch_kubeconfig_secret_key.clone());
            let key = self.text("watch-kubeconfig-secret-key", &flag).data_key()?;
            HomeChoice::Secret {
                namespace: in_namespace,
                name: secret.text,
                key,
            }
        } else if let Some(file) = file {
            HomeChoice::File(file)
        } else {
            HomeChoice::Local
        };

        let list = self.variable("KUBECONFIG").unwrap_or_default();
        Ok(HomeSource {
            choice,
            context: non_empty(Some(self.text("watch-context", &flags.watch_context).text)),
            local: LocalSource {
                flag: self.path("kubeconfig", &flags.kubeconfig),
                kubeconfig_variable: std::env::split_paths(&list)
                    .filter(|path| !path.as_os_str().is_empty())
                    .collect(),
                user_file: self
                    .variable("HOME")
                    .map(|home| PathBuf::from(home).join(".kube/config")),
            },
        })
    }

    /// The variable is case-sensitive and can only switch on, so it never goes through `boolean`.
    fn ensure_watch_crds(&mut self, flags: &Flags) -> Result<bool, SettingsError> {
        let by_flag = match &flags.ensure_watch_crds {
            None => false,
            Some(text) => {
                let given = Given {
                    text: text.clone(),
                    origin: Origin::Flag("ensure-watch-crds"),
                };
                parse_bool(text).ok_or_else(|| given.invalid("a bool", "write true or false"))?
            }
        };
        let by_variable = match self.variable("ENSURE_WATCH_CRDS").as_deref() {
            Some("true" | "1" | "yes") => true,
            None | Some("false" | "0" | "no") => false,
            Some(_) => {
                self.notes.push(
                    "variable ENSURE_WATCH_CRDS has no effect: only true, 1 or yes switch it on"
                        .to_owned(),
                );
                false
            }
        };
        Ok(by_flag || by_variable)
    }

    fn discovery(&mut self, flags: &Flags, namespace: &str) -> Result<Discovery, SettingsError> {
        let given = self.text("providers", &flags.providers);
        let providers = given
            .items()
            .map(|item| {
                let of =
                    |(name, kind): &(&str, ProviderKind)| (*name == item.text).then_some(*kind);
                ProviderKind::ALL.iter().find_map(of).ok_or_else(|| {
                    item.invalid(
                        "a provider of members",
                        "write some of kubeconfig, cluster-profile, cluster-api, kamaji, file",
                    )
                })
            })
            .collect::<Result<_, _>>()?;
        let given = self.text("kubeconfig-namespaces", &flags.kubeconfig_namespaces);
        let namespaces = if given.items().next().is_none() {
            Some([namespace.to_owned()].into())
        } else {
            given.namespaces()?
        };
        let cluster_namespaces = self
            .text("cluster-namespaces", &flags.cluster_namespaces)
            .namespaces()?;
        let accepts = self.text("accept-namespaces", &flags.accept_namespaces);
        let mut accepted_namespaces = match accepts.items().next() {
            Some(_) => accepts.namespaces()?,
            None => Some(BTreeSet::new()),
        };
        if let Some(listed) = &mut accepted_namespaces {
            listed.insert(namespace.to_owned());
        }
        let paths = self.text("kubeconfig-paths", &flags.kubeconfig_paths);
        let kamaji_key = self
            .text("kamaji-kubeconfig-key", &flags.kamaji_kubeconfig_key)
            .data_key()?;
        let label = self.text("kubeconfig-label", &flags.kubeconfig_label);
        if !is_label_key(&label.text) {
            return Err(label.invalid("a label key", "write it as name or as example.org/name"));
        }
        let key = self
            .text("kubeconfig-key", &flags.kubeconfig_key)
            .data_key()?;
        Ok(Discovery {
            providers,
            namespaces,
            cluster_namespaces,
            accepted_namespaces,
            provider_file: self.path(
                "clusterprofile-provider-file",
                &flags.clusterprofile_provider_file,
            ),
            kamaji_key,
            paths: paths.items().map(|item| item.text.into()).collect(),
            label: label.text,
            key,
        })
    }

    fn kubeconfig_policy(&mut self, flags: &Flags) -> Result<Policy, SettingsError> {
        Ok(Policy {
            allow_exec: self
                .boolean("insecure-kubeconfig-exec", &flags.insecure_kubeconfig_exec)?,
            allow_auth_provider: self.boolean(
                "insecure-kubeconfig-auth-provider",
                &flags.insecure_kubeconfig_auth_provider,
            )?,
            allow_token_file: self.boolean(
                "insecure-kubeconfig-token-file",
                &flags.insecure_kubeconfig_token_file,
            )?,
            allow_files: self.boolean(
                "insecure-kubeconfig-files",
                &flags.insecure_kubeconfig_files,
            )?,
            allow_insecure_tls: self
                .boolean("insecure-kubeconfig-tls", &flags.insecure_kubeconfig_tls)?,
            allow_loopback: self.boolean(
                "insecure-kubeconfig-loopback",
                &flags.insecure_kubeconfig_loopback,
            )?,
            allow_link_local: self.boolean(
                "insecure-kubeconfig-link-local",
                &flags.insecure_kubeconfig_link_local,
            )?,
            allow_proxy: self.boolean(
                "insecure-kubeconfig-proxy",
                &flags.insecure_kubeconfig_proxy,
            )?,
        })
    }

    fn chart(&mut self, flags: &Flags) -> Result<ChartSettings, SettingsError> {
        let name = self.text("chart-name", &flags.chart_name);
        if name.text.is_empty() {
            return Err(name.invalid(
                "a chart name",
                "write the chart's name, or the path of a .tgz",
            ));
        }
        let repo = self.text("chart-repo", &flags.chart_repo);
        let is_file = repo.text.is_empty() && name.text.ends_with(".tgz");
        let is_whole = repo.text.is_empty() && name.text.starts_with("oci://");
        let is_url = ["https://", "http://", "oci://"].iter().any(|scheme| {
            repo.text
                .strip_prefix(scheme)
                .is_some_and(|rest| !rest.is_empty())
        });
        for url in [&repo, &name] {
            if url.text.contains("://") && has_userinfo(&url.text) {
                return Err(SettingsError::InvalidSecret {
                    origin: url.origin,
                    class: "a URL without user and password",
                    remedy: "put them into a Secret and name it with --chart-credentials-secret",
                });
            }
        }
        let broken = url_shown(&repo.text) == NO_URL;
        if broken || (!is_file && !is_whole && !is_url) {
            return Err(SettingsError::InvalidSecret {
                origin: repo.origin,
                class: "the URL of a chart repository",
                remedy: "write it with https:// or oci://, or leave it empty and give the path of a .tgz as --chart-name",
            });
        }
        Ok(ChartSettings {
            repo: repo.text,
            name: name.text,
            version: self.text("chart-version", &flags.chart_version).text,
            install_crds: self.boolean("chart-install-crds", &flags.chart_install_crds)?,
            credentials_secret: self.chart_credentials_secret(flags)?,
            keyring: non_empty(Some(self.text("chart-keyring", &flags.chart_keyring).text))
                .map(PathBuf::from),
            plain_http: self.boolean("insecure-chart-http", &flags.insecure_chart_http)?,
            resolve_every: self.chart_resolve_interval(flags)?,
        })
    }

    fn chart_values_from(&mut self, flags: &Flags) -> Result<Vec<Source>, SettingsError> {
        let list = non_empty(Some(flags.chart_values_from.join(",")));
        let given = self.text("chart-values-from", &list);
        let read = |item: Given| {
            let source = item.text.parse();
            source.map_err(|NotASource| {
                item.invalid(
                    "a ConfigMap or Secret with values",
                    "write configmap/NAME or secret/NAME, with /KEY where it is not values.yaml, and with ? at the end where it may be missing",
                )
            })
        };
        given.items().map(read).collect()
    }

    fn lead(&mut self, flags: &Flags) -> Result<Duration, SettingsError> {
        let given = self.text("leader-lease-duration", &flags.leader_lease_duration);
        parse_duration(&given.text)
            .filter(|duration| (crate::leader::DURATION..=LONGEST_LEAD).contains(duration))
            .ok_or_else(|| given.invalid("a duration from 5s to 60s", "write it as 5s or 1m"))
    }

    fn drift(&mut self, flags: &Flags) -> Result<DriftPolicy, SettingsError> {
        let given = self.text("drift", &flags.drift);
        let mode = given.text.parse();
        let interval = self.duration("drift-interval", &flags.drift_interval)?;
        Ok(DriftPolicy {
            mode: mode.map_err(|_| given.invalid("a mode", "write off, warn or heal"))?,
            // At most a day.
            interval_seconds: u32::try_from(interval.as_secs()).unwrap_or(u32::MAX),
        })
    }

    fn chart_credentials_secret(&mut self, flags: &Flags) -> Result<Option<String>, SettingsError> {
        let name = self.text("chart-credentials-secret", &flags.chart_credentials_secret);
        if !name.text.is_empty() && !names::is_dns_subdomain(&name.text) {
            return Err(name.invalid(
                "the name of a Secret",
                "write the name alone; the Secret is in the hub's namespace",
            ));
        }
        Ok(non_empty(Some(name.text)))
    }

    fn chart_resolve_interval(&mut self, flags: &Flags) -> Result<Option<Duration>, SettingsError> {
        let given = self.text("chart-resolve-interval", &flags.chart_resolve_interval);
        let interval = match given.text.as_str() {
            "" | "0" => Some(Duration::ZERO),
            text => parse_duration(text),
        };
        match interval {
            Some(Duration::ZERO) => Ok(None),
            Some(every) if (Duration::from_secs(60)..=LONGEST).contains(&every) => Ok(Some(every)),
            _ => Err(given.invalid(
                "a duration from 1m to 24h, or 0",
                "write numbers with units, as 15m or 1h30m",
            )),
        }
    }

    fn allow_chart_skip(&mut self) -> bool {
        match self.variable("ALLOW_CHART_SKIP").as_deref() {
            Some("true") => true,
            None | Some("false") => false,
            Some(_) => {
                self.notes.push(
                    "variable ALLOW_CHART_SKIP has no effect: only true switches it on".to_owned(),
                );
                false
            }
        }
    }

    fn service_account(
        &mut self,
        flags: &Flags,
        namespace: &str,
    ) -> Result<Option<ServiceAccount>, SettingsError> {
        let given = self.text("helm-service-account", &flags.helm_service_account);
        if given.text.is_empty() {
            return Ok(None);
        }
        match ServiceAccount::parse(&given.text, namespace) {
            Some(account) => Ok(Some(account)),
            None => Err(given.invalid(
                "a service account",
                "write NAMESPACE/NAME, or NAME for one in the hub's namespace",
            )),
        }
    }

    fn helm(&mut self, flags: &Flags, namespace: &str) -> Result<HelmSettings, SettingsError> {
        let program = self.text("helm", &flags.helm);
        if program.text.is_empty() {
            return Err(
                program.invalid("a program", "write the path of helm, or leave the flag out")
            );
        }
        let runs = self.text("max-concurrent-helm", &flags.max_concurrent_helm);
        let max_concurrent = runs
            .text
            .parse()
            .ok()
            .filter(|runs| (1..=MOST_HELM_RUNS).contains(runs))
            .ok_or_else(|| {
                runs.invalid("a number from 1 to 64", "write how many may run at once")
            })?;
        let cache_dir = self
            .path("helm-cache-dir", &flags.helm_cache_dir)
            .unwrap_or_else(|| {
                let temporary = self.variable("TMPDIR").unwrap_or_else(|| "/tmp".to_owned());
                PathBuf::from(temporary).join("krypton-hub")
            });
        Ok(HelmSettings {
            program: PathBuf::from(program.text),
            service_account: self.service_account(flags, namespace)?,
            timeout: self.duration("helm-timeout", &flags.helm_timeout)?,
            retries: self.retries(flags)?,
            remediation: self.remediation(flags)?,
            history_max: self.history_max(flags)?,
            max_concurrent,
            max_per_member: self.max_per_member(flags, max_concurrent)?,
            cache_dir,
            private_dir: self.path("private-dir", &flags.private_dir),
        })
    }

    fn handling(&mut self, flags: &Flags) -> Result<Handling, SettingsError> {
        let given = self.text("wait", &flags.wait);
        let wait = given.text.parse();
        let wait = wait.map_err(|_| given.invalid("a policy", "write none, ready or hooks"))?;
        let flag = &flags.delete_cert_manager_crds;
        Ok(Handling {
            wait,
            delete_cert_manager_crds: self.boolean("delete-cert-manager-crds", flag)?,
            allow_chart_skip: self.allow_chart_skip(),
        })
    }

    fn lockdown(&mut self, flags: &Flags) -> Result<Lockdown, SettingsError> {
        let account = self.text("default-service-account", &flags.default_service_account);
        if !account.text.is_empty() && !names::is_dns_subdomain(&account.text) {
            return Err(account.invalid(
                "the name of a service account",
                "write the name alone; it is of each Tenant's own namespace",
            ));
        }
        let flag = &flags.no_cross_namespace_refs;
        Ok(Lockdown {
            no_cross_namespace_refs: self.boolean("no-cross-namespace-refs", flag)?,
            default_service_account: account.text,
        })
    }

    fn namespaces(&mut self, flags: &Flags) -> Result<NamespaceConfiguration, SettingsError> {
        let list = |given: &[String]| non_empty(Some(given.join(",")));
        let labels = self.text("workspace-labels", &list(&flags.workspace_labels));
        let annotations = self.text("workspace-annotations", &list(&flags.workspace_annotations));
        let refused = |given: &Given, error: ConfigurationError| {
            given.invalid("one that namespaces can have", error.remedy())
        };
        let mut configuration = NamespaceConfiguration {
            labels: labels.pairs()?,
            ..NamespaceConfiguration::default()
        };
        let checked = configuration.check();
        checked.map_err(|error| refused(&labels, error))?;
        configuration.annotations = annotations.pairs()?;
        let checked = configuration.check();
        checked.map_err(|error| refused(&annotations, error))?;
        Ok(configuration)
    }

    fn retries(&mut self, flags: &Flags) -> Result<Option<u32>, SettingsError> {
        let given = self.text("retries", &flags.retries);
        if given.text.is_empty() {
            return Ok(None);
        }
        let number = given.text.parse().map(Some);
        number.map_err(|_| {
            given.invalid(
                "a number of retries",
                "write 0 or more, or leave it out to try without end",
            )
        })
    }

    fn max_per_member(&mut self, flags: &Flags, in_all: usize) -> Result<usize, SettingsError> {
        let flag = &flags.max_concurrent_helm_per_member;
        let given = self.text("max-concurrent-helm-per-member", flag);
        if given.text.is_empty() {
            return Ok((in_all - 1).max(1));
        }
        let number = given.text.parse().ok();
        let number = number.filter(|number| (1..=in_all).contains(number));
        number.ok_or_else(|| {
            given.invalid(
                "a number from 1 to that of --max-concurrent-helm",
                "write how many may run at once for one member",
            )
        })
    }

    fn history_max(&mut self, flags: &Flags) -> Result<u8, SettingsError> {
        let given = self.text("history-max", &flags.history_max);
        let number = given.text.parse().ok();
        let number = number.filter(|number| HISTORY.contains(number));
        number.ok_or_else(|| {
            given.invalid(
                "a number from 2 to 100",
                "write how many revisions of a release are kept",
            )
        })
    }

    fn remediation(&mut self, flags: &Flags) -> Result<Remediation, SettingsError> {
        let given = self.text("remediation", &flags.remediation);
        given.text.parse().map_err(|_| {
            given.invalid(
                "a remediation",
                "write keep, or rollback to put the last good revision back",
            )
        })
    }

    /// Whole seconds or a Go duration; anything else means the default.
    fn check_interval(&mut self) -> Duration {
        let Some(text) = self.variable("KRYPTON_CHECK_INTERVAL") else {
            return CHECK_INTERVAL_DEFAULT;
        };
        let text = text.trim();
        let seconds = || text.parse().ok().map(Duration::from_secs);
        parse_duration(text).or_else(seconds).filter(|d| !d.is_zero()).unwrap_or_else(|| {
            self.notes.push(
                "variable KRYPTON_CHECK_INTERVAL is neither a Go duration nor whole seconds above 0: 60s is used"
                    .to_owned(),
            );
            CHECK_INTERVAL_DEFAULT
        })
    }

    /// Those of agents, metrics, health and debug.
    fn bind_addresses(&mut self, flags: &Flags) -> Result<[Option<BindAddress>; 4], SettingsError> {
        let given = [
            ("listen", &flags.listen),
            ("metrics-bind-address", &flags.metrics_bind_address),
            (
                "health-probe-bind-address",
                &flags.health_probe_bind_address,
            ),
            ("debug-bind-address", &flags.debug_bind_address),
        ]
        .map(|(name, flag)| self.text(name, &non_empty(flag.clone())));
        let mut addresses = [const { None }; 4];
        for (index, one) in given.iter().enumerate() {
            let address = bind_address(one)?;
            let same = addresses
                .iter()
                .position(|earlier| address.is_some() && *earlier == address);
            match (same, &address) {
                (Some(earlier), Some(address)) if address.port != 0 => {
                    return Err(SettingsError::SameAddress {
                        first: given[earlier].origin,
                        second: one.origin,
                        address: address.clone(),
                    });
                }
                _ => addresses[index] = address,
            }
        }
        let [.., debug] = &given;
        if !addresses[3].as_ref().is_none_or(is_loopback) {
            return Err(debug.invalid(
                "a loopback address",
                "it has no password: write it as 127.0.0.1:8082, or 0 to switch it off",
            ));
        }
        Ok(addresses)
    }

    fn advertise(&mut self, flags: &Flags) -> Result<Vec<String>, SettingsError> {
        let given = self.text("advertise", &non_empty(Some(flags.advertise.join(","))));
        let mut addresses = Vec::new();
        for address in given.text.split(',').map(str::trim) {
            if address.is_empty() || addresses.iter().any(|known| known == address) {
                continue;
            }
            if split_address(address).is_none() {
                let one = Given {
                    text: address.to_owned(),
                    origin: given.origin,
                };
                return Err(one.invalid(
                    "HOST:PORT",
                    "write the name or address that agents reach the hub by, and the port, as hub.example.org:7443",
                ));
            }
            addresses.push(address.to_owned());
        }
        Ok(addresses)
    }

    fn log(&mut self, flags: &Flags) -> Result<(LogFormat, Option<tracing::Level>), SettingsError> {
        let encoder = self.text("zap-encoder", &non_empty(flags.zap_encoder.clone()));
        let by_encoder = match encoder.text.as_str() {
            "" => None,
            "json" => Some(LogFormat::Json),
            "console" => Some(LogFormat::Text),
            _ => return Err(encoder.invalid("an encoder", "write json or console")),
        };
        let format = self.text("log-format", &non_empty(flags.log_format.clone()));
        let by_format = match format.text.as_str() {
            "text" => LogFormat::Text,
            "json" => LogFormat::Json,
            _ => return Err(format.invalid("a log format", "write text or json")),
        };
        let is_default = format.origin == Origin::Default("log-format");
        let log_format = by_encoder.filter(|_| is_default).unwrap_or(by_format);

        let level = self.text("zap-log-level", &non_empty(flags.zap_log_level.clone()));
        let log_level = match level.text.as_str() {
            "" => None,
            "debug" => Some(tracing::Level::DEBUG),
            "info" => Some(tracing::Level::INFO),
            "warn" => Some(tracing::Level::WARN),
            "error" | "panic" => Some(tracing::Level::ERROR),
            number => match number.parse::<u8>() {
                Ok(1) => Some(tracing::Level::DEBUG),
                Ok(2..) => Some(tracing::Level::TRACE),
                _ => {
                    return Err(level.invalid(
                        "a log level",
                        "write debug, info, warn, error, panic or a number from 1 to 255",
                    ));
                }
            },
        };
        Ok((log_format, log_level))
    }

    fn otlp_endpoint(&mut self, flags: &Flags) -> Result<Option<OtlpEndpoint>, SettingsError> {
        let given = self.text("otlp-endpoint", &non_empty(flags.otlp_endpoint.clone()));
        if given.text.is_empty() {
            return Ok(None);
        }
        let refused = |why| SettingsError::InvalidSecret {
            origin: given.origin,
            class: "the address of a collector",
            remedy: match why {
                NoEndpoint::Form => "write http://HOST:4317, or https:// for TLS",
                NoEndpoint::Login => "set OTEL_EXPORTER_OTLP_HEADERS in place of user and password",
            },
        };
        given.text.parse().map(Some).map_err(refused)
    }

    fn refuse_foreign_helm_driver(&self) -> Result<(), SettingsError> {
        match self.variable("HELM_DRIVER") {
            Some(text) if !matches!(text.as_str(), "secret" | "secrets") => {
                let given = Given {
                    text,
                    origin: Origin::Variable("HELM_DRIVER"),
                };
                Err(given.invalid(
                    "a driver that the hub can read releases of",
                    "unset it, and move releases of another driver to Secrets first",
                ))
            }
            _ => Ok(()),
        }
    }

    /// Whether it was given. What is too short means the default, as in the Knative operator.
    fn poll_interval(&mut self, flags: &Flags) -> Result<bool, SettingsError> {
        let flag = &flags.remote_deployments_poll_interval;
        let given = self.text("remote-deployments-poll-interval", flag);
        let interval = parse_duration(&given.text)
            .ok_or_else(|| given.invalid("a duration", "write numbers with units, as 10s"))?;
        if interval < Duration::from_secs(1) {
            let note = format!(
                "flag --remote-deployments-poll-interval={} is below 1s: 10s is meant",
                given.text
            );
            self.notes.push(note);
        }
        Ok(
            given.origin != Origin::Default("remote-deployments-poll-interval")
                && given.text != "10s",
        )
    }

    fn note_flags_without_effect(&mut self, flags: &Flags) -> Result<(), SettingsError> {
        let given = [
            (
                "leader-elect",
                self.boolean("leader-elect", &flags.leader_elect)?,
            ),
            (
                "remote-deployments-poll-interval",
                self.poll_interval(flags)?,
            ),
            ("zap-devel", flags.zap_devel.is_some()),
            ("zap-stacktrace-level", flags.zap_stacktrace_level.is_some()),
            ("zap-time-encoding", flags.zap_time_encoding.is_some()),
        ];
        for (name, _) in given.iter().filter(|(_, given)| *given) {
            self.notes.push(format!("flag --{name} has no effect"));
        }
        Ok(())
    }
}

fn bind_address(given: &Given) -> Result<Option<BindAddress>, SettingsError> {
    if given.text == "0" {
        return Ok(None);
    }
    given.text.parse().map(Some).map_err(|NotABindAddress| {
        given.invalid(
            "a listen address",
            "write :PORT, HOST:PORT, or 0 to switch it off",
        )
    })
}

/// A qualified name as Kubernetes has it: an optional DNS subdomain and `/`, then 1 to 63 letters,
/// digits, `-`, `_` or `.`, with a letter or digit at both ends.
fn is_label_key(text: &str) -> bool {
    let name = match text.split_once('/') {
        Some((prefix, _)) if !names::is_dns_subdomain(prefix) => return false,
        Some((_, name)) => name,
        None => text,
    };
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    name.len() <= 63
        && name.chars().all(legal)
        && edge(name.chars().next())
        && edge(name.chars().next_back())
}
