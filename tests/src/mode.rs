//! The ways in which Krypton manages a member.

use krypton_crds::edge_cluster;

/// The way in which Krypton manages a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The hub manages the home cluster itself, which is a member by default.
    SelfCluster,
    /// The hub manages the member through a kubeconfig from a Secret.
    Proxy,
    /// An agent on the member, enrolled with a join bundle, manages it. The hub has no kubeconfig.
    Agent,
}

impl Mode {
    /// Returns the mode in the EdgeCluster's status.
    pub fn in_status(self) -> edge_cluster::Mode {
        match self {
            Self::SelfCluster | Self::Proxy => edge_cluster::Mode::Proxy,
            Self::Agent => edge_cluster::Mode::Agent,
        }
    }
}
