//! Owner of a release: a Tenant on the cluster, or a KryptonDeployment that the home cluster orders.
//!
//! Both own a release in a namespace. A KryptonDeployment has no object here, so the reconciler writes only its
//! release.

use std::fmt;
use std::sync::Arc;

use krypton_crds::tenant::Tenant;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_types::conditions::{self, ClusterState};
use krypton_types::deployment::{DeploymentKey, DesiredDeployment};
use krypton_types::desired::lockdown::Lockdown;
use krypton_types::names;
use krypton_types::placed_tenant::placed_on;
use krypton_types::tenant::{REQUEST_MAX, TenantKey};
use serde_json::{Map, Value};
use tracing::Span;
use tracing::field::{Empty, display};

/// Key of an owner. A Tenant and a KryptonDeployment may have the same namespace and name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OwnerKey {
    Tenant(TenantKey),
    Deployment(DeploymentKey),
}

impl OwnerKey {
    /// Returns the namespace of the object. For a KryptonDeployment, it is a namespace of the home cluster.
    pub fn namespace(&self) -> &str {
        match self {
            Self::Tenant(key) => &key.namespace,
            Self::Deployment(key) => &key.namespace,
        }
    }

    pub fn name(&self) -> &str {
        match self {
            Self::Tenant(key) => &key.name,
            Self::Deployment(key) => &key.name,
        }
    }

    /// Returns a span for the owner's actions. It adds the owner and its generation to each log line.
    pub fn span(&self, member: &str, generation: i64, release: &ReleaseKey) -> Span {
        let release = &*release.name;
        let (tenant, deployment) = match self {
            Self::Tenant(key) => (Some(display(key)), None),
            Self::Deployment(key) => (None, Some(display(key))),
        };
        tracing::error_span!(
            "work",
            tenant,
            deployment,
            member,
            generation,
            release,
            action = Empty,
            outcome = Empty
        )
    }
}

impl fmt::Display for OwnerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tenant(key) => key.fmt(f),
            Self::Deployment(key) => key.fmt(f),
        }
    }
}

#[derive(Clone, Debug)]
pub enum ReleaseOwner {
    Tenant(Arc<Tenant>),
    Deployment(Arc<DesiredDeployment>),
}

impl ReleaseOwner {
    /// Returns the kind of the object that the user creates.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Tenant(_) => "Tenant",
            Self::Deployment(_) => "KryptonDeployment",
        }
    }

    pub fn tenant(&self) -> Option<&Arc<Tenant>> {
        match self {
            Self::Tenant(tenant) => Some(tenant),
            Self::Deployment(_) => None,
        }
    }

    pub fn deployment(&self) -> Option<&DesiredDeployment> {
        match self {
            Self::Tenant(_) => None,
            Self::Deployment(order) => Some(order),
        }
    }

    pub fn namespace(&self) -> &str {
        match self {
            Self::Tenant(tenant) => tenant.metadata.namespace.as_deref().unwrap_or_default(),
            Self::Deployment(order) => &order.namespace,
        }
    }

    pub fn name(&self) -> &str {
        match self {
            Self::Tenant(tenant) => tenant.metadata.name.as_deref().unwrap_or_default(),
            Self::Deployment(order) => &order.name,
        }
    }

    pub fn uid(&self) -> &str {
        match self {
            Self::Tenant(tenant) => tenant.metadata.uid.as_deref().unwrap_or_default(),
            Self::Deployment(order) => &order.uid,
        }
    }

    pub fn generation(&self) -> i64 {
        match self {
            Self::Tenant(tenant) => tenant.metadata.generation.unwrap_or_default(),
            Self::Deployment(order) => order.generation,
        }
    }

    /// Returns an annotation of the object. For a KryptonDeployment, only annotations in its order.
    pub fn annotation(&self, name: &str) -> Option<&str> {
        match self {
            Self::Tenant(tenant) => {
                let annotations = tenant.metadata.annotations.as_ref()?;
                annotations.get(name).map(String::as_str)
            }
            Self::Deployment(order) => match name {
                names::PAUSED_ANNOTATION => order.paused.then_some("true"),
                names::ORPHAN_ANNOTATION => order.orphan.then_some("true"),
                names::RECONCILE_REQUESTED_ANNOTATION => order.requested.as_deref(),
                _ => order.annotations.get(name).map(String::as_str),
            },
        }
    }

    /// Returns the value of the annotation that requests a reconcile, unless it is too long to acknowledge.
    pub fn reconcile_request(&self) -> Option<&str> {
        self.annotation(names::RECONCILE_REQUESTED_ANNOTATION)
            .filter(|request| request.len() <= REQUEST_MAX)
    }

    /// Returns true if the release must be uninstalled: the Tenant is deleted or the home cluster orders the removal.
    pub fn is_being_removed(&self) -> bool {
        match self {
            Self::Tenant(tenant) => tenant.metadata.deletion_timestamp.is_some(),
            Self::Deployment(order) => order.remove,
        }
    }

    /// Returns true if the owner belongs to this member.
    pub fn is_for(&self, cluster: &str, source_namespace: Option<&str>) -> bool {
        match self {
            Self::Tenant(tenant) => {
                placed_on(tenant).is_none() && tenant.is_for(cluster, source_namespace)
            }
            Self::Deployment(_) => true,
        }
    }

    /// Returns the member that the Tenant itself names.
    pub fn named_member(&self) -> Option<&str> {
        self.tenant()?.referenced_member()
    }

    pub fn release(&self, cluster: &str) -> ReleaseKey {
        match self {
            Self::Tenant(tenant) => ReleaseKey {
                namespace: tenant.workspace().to_owned(),
                name: names::tenant_release(self.name(), cluster),
            },
            Self::Deployment(order) => ReleaseKey::new(order.workspace(), order.release()),
        }
    }

    /// Returns the user that Helm impersonates. `None` for Helm's own account.
    pub fn user(&self, lockdown: &Lockdown) -> Option<String> {
        let spec = self.tenant().map(|tenant| &tenant.spec);
        let service_account = spec.and_then(|spec| spec.service_account_name.as_deref());
        lockdown.user(self.namespace(), service_account)
    }

    /// Returns the owner's own values.
    pub fn values(&self) -> Option<&Map<String, Value>> {
        self.tenant()?.spec.values.as_ref()
    }

    /// Returns the member's state in the status.
    pub fn state_in_status(&self, cluster: &str) -> Option<ClusterState> {
        let conditions = &self.tenant()?.status.as_ref()?.conditions;
        conditions::clusters(conditions).remove(cluster)
    }

    /// Returns the sort key among the claimants of one release: the first owns it. A removal order comes
    /// last. A completed removal therefore blocks no other claimant.
    pub fn seniority(&self) -> impl Ord + use<> {
        let created = match self {
            Self::Tenant(tenant) => {
                let created = tenant.metadata.creation_timestamp.as_ref();
                created.map(|time| time.0.as_nanosecond())
            }
            Self::Deployment(order) => Some(i128::from(order.created) * 1_000_000_000),
        };
        let is_removal = self.deployment().is_some_and(|order| order.remove);
        (is_removal, created, self.uid().to_owned())
    }
}
