//! The test harness: control planes, a chart repository, hubs and agents on loopback. Each ends with its owner.
//!
//! It also contains the demo, the benchmark and the soak test. No program of Krypton imports it.

pub mod agent;
pub mod answering_proxy;
pub mod canary;
pub mod chart_repository;
pub mod cluster;
pub mod collector;
pub mod daemon;
pub mod fault_proxy;
pub mod fleet;
mod folder;
pub mod foreign_crd;
pub mod gate;
pub mod gitops;
pub mod held;
pub mod helm_watch;
pub mod hub;
pub mod kubeconfig;
pub mod kubelet;
pub mod load;
pub mod membership;
pub mod merge;
pub mod mode;
pub mod no_tenants;
pub mod original;
pub mod own_chart;
pub mod pair;
pub mod planes;
pub mod port;
pub mod process;
pub mod program;
pub mod registry;
pub mod release_payload;
pub mod scenario;
pub mod service_account;
pub mod service_port;
pub mod test_result;
pub mod tools;
pub mod wait;

pub use agent::{Agent, AgentOptions};
pub use answering_proxy::{AnsweringProxy, FalseResponse, ResponseFault};
pub use chart_repository::{ChartRepository, ChartSource, Fault, Signer};
pub use cluster::{AuditedRequest, Cluster, Parts};
pub use collector::{Collector, ReceivedSpan};
pub use daemon::Daemon;
pub use fault_proxy::{FaultLine, FaultProxy, Traffic};
pub use foreign_crd::ForeignCrd;
pub use gate::Gate;
pub use gitops::{argo_health, kstatus};
pub use helm_watch::HelmWatch;
pub use hub::{Hub, HubOptions};
pub use kubelet::{ForwardedPod, Kubelet};
pub use membership::{Membership, join_bundle, kubectl_krypton};
pub use merge::Merge;
pub use mode::Mode;
pub use original::Original;
pub use own_chart::{AgentPod, HubPod, OwnChart, PodName};
pub use pair::Pair;
pub use registry::Registry;
pub use scenario::{Scenario, ServedChart, home_and_edge};
pub use service_account::ServiceAccountAccess;
pub use service_port::ServicePort;
pub use test_result::TestResult;
pub use tools::Tools;
pub use wait::{
    STEP_DEADLINE, eventually, eventually_within, wait_until_gone, wait_until_replaced,
};

/// Makes aws-lc-rs the TLS provider of this process, because kube and reqwest are built without one.
pub fn install_tls_provider() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Another thread may have installed the same provider first.
        drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    }
}
