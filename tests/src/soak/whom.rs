//! Defines the targets of faults: members, hubs, Tenants with their workspaces, and objects of the chart.

use krypton_types::names;

/// A member of the fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Edge {
    /// Managed by an agent.
    One,
    /// Managed by the hub through a kubeconfig.
    Two,
}

impl Edge {
    pub(crate) const ALL: [Self; 2] = [Self::One, Self::Two];

    /// Returns the member's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::One => "edge-1",
            Self::Two => "edge-2",
        }
    }
}

/// One of the hubs on the home cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum HubId {
    A,
    B,
}

impl HubId {
    const ALL: [Self; 2] = [Self::A, Self::B];

    /// Returns the first `count` hubs, or all if there are fewer.
    pub(crate) fn first(count: usize) -> &'static [Self] {
        Self::ALL.get(..count).unwrap_or(&Self::ALL)
    }

    /// Returns the hub's pod name, which its Leases contain.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::A => "hub-a",
            Self::B => "hub-b",
        }
    }

    /// Returns the hub with this holder identity.
    pub(crate) fn holding(holder: &str) -> Option<Self> {
        let name = holder.split('/').nth(1)?;
        Self::ALL.into_iter().find(|hub_id| hub_id.name() == name)
    }
}

/// A slot for a Tenant, which may or may not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Tenant(pub(crate) usize);

impl Tenant {
    pub(crate) fn edge(self) -> Edge {
        match self.0.is_multiple_of(2) {
            true => Edge::One,
            false => Edge::Two,
        }
    }

    pub(crate) fn name(self) -> String {
        format!("t-{:03}", self.0)
    }

    pub(crate) fn release(self) -> String {
        names::tenant_release(&self.name(), self.edge().name())
    }
}

/// Value of a Tenant's `spec.workspace`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Workspace {
    /// Unset: the namespace has the Tenant's name.
    Unset,
    /// Set to the Tenant's name.
    Named,
    /// A separate namespace with another name.
    Own,
    /// An existing namespace, shared with other Tenants.
    Shared(u8),
}

impl Workspace {
    pub(crate) fn shared(number: u8) -> String {
        format!("theirs-{number}")
    }

    pub(crate) fn namespace(self, tenant: Tenant) -> String {
        match self {
            Self::Unset | Self::Named => tenant.name(),
            Self::Own => format!("{}-ws", tenant.name()),
            Self::Shared(number) => Self::shared(number),
        }
    }
}

/// An object of the small chart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Object {
    ConfigMap,
    Service,
    Deployment,
}

impl Object {
    pub(crate) const ALL: [Self; 3] = [Self::ConfigMap, Self::Service, Self::Deployment];
}
