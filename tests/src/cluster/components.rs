//! Builds the command lines of a control plane's components and writes the files they read.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::{audit, credentials::Credentials, path_with};
use crate::{process::Invocation, tools::Tools};

/// A /24 is too small for two Services for each of hundreds of Tenants.
const SERVICE_RANGE: &str = "10.96.0.0/16";
const POD_RANGE: &str = "10.244.0.0/16";

/// Controllers of volumes, devices, certificate requests, quotas, periodic and old workloads, and storage versions. They
/// more than double the requests with which a controller manager starts, and no chart or test needs them.
const UNUSED_CONTROLLERS: [&str; 25] = [
    "certificatesigningrequest-approving-controller",
    "certificatesigningrequest-cleaner-controller",
    "certificatesigningrequest-signing-controller",
    "cronjob-controller",
    "device-taint-eviction-controller",
    "ephemeral-volume-controller",
    "kube-apiserver-serving-clustertrustbundle-publisher-controller",
    "legacy-serviceaccount-token-cleaner-controller",
    "persistentvolume-attach-detach-controller",
    "persistentvolume-binder-controller",
    "persistentvolume-expander-controller",
    "persistentvolume-protection-controller",
    "podcertificaterequest-cleaner-controller",
    "podgroup-protection-controller",
    "replicationcontroller-controller",
    "resourceclaim-controller",
    "resourcepoolstatusrequest-controller",
    "resourcequota-controller",
    "storage-version-migrator-controller",
    "storageversion-garbage-collector-controller",
    "taint-eviction-controller",
    "ttl-after-finished-controller",
    "ttl-controller",
    "validatingadmissionpolicy-status-controller",
    "volumeattributesclass-protection-controller",
];

/// Resources that tests change rarely or never. Each watch cache of the API server wakes every second, and these would
/// take half the CPU time of an idle one.
const UNCACHED_RESOURCES: [&str; 40] = [
    "certificatesigningrequests.certificates.k8s.io",
    "clustertrustbundles.certificates.k8s.io",
    "controllerrevisions.apps",
    "cronjobs.batch",
    "csidrivers.storage.k8s.io",
    "csinodes.storage.k8s.io",
    "csistoragecapacities.storage.k8s.io",
    "deviceclasses.resource.k8s.io",
    "endpoints",
    "endpointslices.discovery.k8s.io",
    "flowschemas.flowcontrol.apiserver.k8s.io",
    "horizontalpodautoscalers.autoscaling",
    "ingressclasses.networking.k8s.io",
    "ingresses.networking.k8s.io",
    "ipaddresses.networking.k8s.io",
    "limitranges",
    "mutatingadmissionpolicies.admissionregistration.k8s.io",
    "mutatingadmissionpolicybindings.admissionregistration.k8s.io",
    "mutatingwebhookconfigurations.admissionregistration.k8s.io",
    "networkpolicies.networking.k8s.io",
    "persistentvolumeclaims",
    "persistentvolumes",
    "podcertificaterequests.certificates.k8s.io",
    "poddisruptionbudgets.policy",
    "podtemplates",
    "priorityclasses.scheduling.k8s.io",
    "prioritylevelconfigurations.flowcontrol.apiserver.k8s.io",
    "replicationcontrollers",
    "resourceclaims.resource.k8s.io",
    "resourceclaimtemplates.resource.k8s.io",
    "resourcequotas",
    "resourceslices.resource.k8s.io",
    "runtimeclasses.node.k8s.io",
    "servicecidrs.networking.k8s.io",
    "storageclasses.storage.k8s.io",
    "validatingadmissionpolicies.admissionregistration.k8s.io",
    "validatingadmissionpolicybindings.admissionregistration.k8s.io",
    "validatingwebhookconfigurations.admissionregistration.k8s.io",
    "volumeattachments.storage.k8s.io",
    "volumeattributesclasses.storage.k8s.io",
];

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Component {
    Etcd,
    Apiserver,
    ControllerManager,
    Scheduler,
    Kwok,
}

impl Component {
    /// Optional components of a control plane.
    pub(crate) const CONTROLLERS: [Self; 3] =
        [Self::ControllerManager, Self::Scheduler, Self::Kwok];

    /// Name of the binary and of the log.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::Apiserver => "kube-apiserver",
            Self::ControllerManager => "kube-controller-manager",
            Self::Scheduler => "kube-scheduler",
            Self::Kwok => "kwok",
        }
    }
}

/// Whether the API server writes an audit log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Audit {
    Off,
    On,
}

/// Ports and file paths that the components of one cluster share.
#[derive(Debug)]
pub(super) struct Components {
    tools: Tools,
    folder: PathBuf,
    kubeconfig: PathBuf,
    port: u16,
    etcd_port: u16,
    audit: Audit,
}

impl Components {
    pub(super) fn new(
        tools: &Tools,
        folder: &Path,
        (port, etcd_port): (u16, u16),
        audit: Audit,
    ) -> Self {
        let (folder, kubeconfig) = (folder.to_owned(), folder.join("kubeconfig"));
        Self {
            tools: tools.clone(),
            folder,
            kubeconfig,
            port,
            etcd_port,
            audit,
        }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    pub(super) fn audit_log(&self) -> PathBuf {
        self.folder.join("audit.log")
    }

    /// HOME of all processes that run for this cluster.
    pub(super) fn home(&self) -> PathBuf {
        self.folder.join("home")
    }

    pub(super) fn server(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    pub(super) fn write_files(&self, credentials: &Credentials, name: &str) -> Result<()> {
        self.write_home(credentials, name)?;
        let files = [
            ("ca.crt", credentials.ca.as_str()),
            ("apiserver.crt", &credentials.apiserver.certificate),
            ("apiserver.key", &credentials.apiserver.key),
            ("service-account.key", &credentials.service_account_key),
            (
                "service-account.pub",
                &credentials.service_account_public_key,
            ),
            ("audit-policy.yaml", audit::POLICY),
        ];
        for (file, content) in files {
            self.write(file, content)?;
        }
        Ok(())
    }

    /// Recreates the home folder and writes the kubeconfig, which contains the cluster's name.
    pub(super) fn write_home(&self, credentials: &Credentials, name: &str) -> Result<()> {
        let home = self.home();
        if home.exists() {
            fs::remove_dir_all(&home).context("removing the cluster's home folder")?;
        }
        fs::create_dir(home).context("creating the cluster's home folder")?;
        self.write("kubeconfig", &credentials.kubeconfig(name, &self.server()))
    }

    pub(super) fn write_tokens(&self, tokens: &[&str]) -> Result<()> {
        let line = |token: &&str| format!("{token},token-admin,token-admin,system:masters\n");
        self.write("tokens.csv", &tokens.iter().map(line).collect::<String>())
    }

    fn write(&self, file: &str, content: &str) -> Result<()> {
        let path = self.folder.join(file);
        fs::write(&path, content).with_context(|| format!("writing {}", path.display()))
    }

    pub(super) fn invocation(&self, component: Component) -> Invocation {
        let args = match component {
            Component::Etcd => self.etcd(),
            Component::Apiserver => self.apiserver(),
            Component::ControllerManager => self.controller_manager(),
            Component::Scheduler => self.scheduler(),
            Component::Kwok => self.kwok(),
        };
        Invocation::new(self.tools.binary(component.name()))
            .args(args)
            .env("PATH", path_with(&self.tools))
            .env("HOME", self.home())
            // Reduces CPU time by a third, for about 50 MB more memory in each component.
            .env("GOGC", "400")
            // Many components share the cores, so threads that search for work cost more than they gain.
            .env("GOMAXPROCS", "1")
    }

    fn etcd(&self) -> Vec<String> {
        let clients = format!("http://127.0.0.1:{}", self.etcd_port);
        vec![
            "--unsafe-no-fsync=true".to_owned(),
            format!("--data-dir={}", self.path("etcd")),
            format!("--listen-client-urls={clients}"),
            format!("--advertise-client-urls={clients}"),
            // A single-member etcd cluster has no peers, so any port works.
            "--listen-peer-urls=http://127.0.0.1:0".to_owned(),
            "--log-level=warn".to_owned(),
            // The defaults wake an idle etcd 40 times a second. A single member elects itself immediately.
            "--heartbeat-interval=500".to_owned(),
            "--election-timeout=5000".to_owned(),
            "--backend-batch-interval=1s".to_owned(),
        ]
    }

    fn apiserver(&self) -> Vec<String> {
        let mut args = vec![
            format!("--etcd-servers=http://127.0.0.1:{}", self.etcd_port),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--secure-port={}", self.port),
            // Endpoints can't contain loopback addresses, so the reconciler is disabled.
            "--endpoint-reconciler-type=none".to_owned(),
            format!("--service-cluster-ip-range={SERVICE_RANGE}"),
            format!("--tls-cert-file={}", self.path("apiserver.crt")),
            format!("--tls-private-key-file={}", self.path("apiserver.key")),
            format!("--client-ca-file={}", self.path("ca.crt")),
            format!("--token-auth-file={}", self.path("tokens.csv")),
            "--authorization-mode=RBAC".to_owned(),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            format!(
                "--service-account-key-file={}",
                self.path("service-account.pub")
            ),
            format!(
                "--service-account-signing-key-file={}",
                self.path("service-account.key")
            ),
            "--allow-privileged=true".to_owned(),
            "--profiling=false".to_owned(),
            format!("--watch-cache-sizes={}#0", UNCACHED_RESOURCES.join("#0,")),
        ];
        if self.audit == Audit::On {
            args.extend([
                format!("--audit-policy-file={}", self.path("audit-policy.yaml")),
                format!("--audit-log-path={}", self.audit_log().display()),
                // In MB. Exceeds the output of any test, so the log stays one file.
                "--audit-log-maxsize=2000".to_owned(),
            ]);
        }
        args
    }

    fn controller_manager(&self) -> Vec<String> {
        let mut args = self.apiserver_client_flags();
        args.extend([
            format!("--root-ca-file={}", self.path("ca.crt")),
            format!(
                "--service-account-private-key-file={}",
                self.path("service-account.key")
            ),
            format!("--controllers=*,-{}", UNUSED_CONTROLLERS.join(",-")),
            // kwok doesn't play a kubelet that makes pods ready again after their node was NotReady.
            "--node-monitor-grace-period=1h".to_owned(),
        ]);
        args
    }

    fn scheduler(&self) -> Vec<String> {
        self.apiserver_client_flags()
    }

    /// Flags for a client that serves no port, needs no leader election and doesn't throttle measurements.
    fn apiserver_client_flags(&self) -> Vec<String> {
        vec![
            format!("--kubeconfig={}", self.kubeconfig.display()),
            "--secure-port=0".to_owned(),
            "--leader-elect=false".to_owned(),
            "--kube-api-qps=200".to_owned(),
            "--kube-api-burst=400".to_owned(),
        ]
    }

    fn kwok(&self) -> Vec<String> {
        vec![
            format!("--kubeconfig={}", self.kubeconfig.display()),
            format!("--config={}", self.tools.stages().display()),
            "--manage-all-nodes=true".to_owned(),
            // Without leases, the node becomes NotReady after 40 s, and all Deployments become unavailable.
            "--node-lease-duration-seconds=40".to_owned(),
            format!("--cidr={POD_RANGE}"),
            "--node-ip=10.0.0.1".to_owned(),
        ]
    }

    fn path(&self, file: &str) -> String {
        self.folder.join(file).display().to_string()
    }
}
