//! The kinds of Krypton that commands show or change.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_crds::tenant::Tenant;
use kube::core::ApiResource;

use crate::home::Connection;
use crate::objects::Scope;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Cluster,
    Tenant,
    Deployment,
}

impl Kind {
    pub(crate) const ALL: [Self; 3] = [Self::Cluster, Self::Tenant, Self::Deployment];

    /// Names on the command line: singular, plural, and aliases.
    fn names(self) -> &'static [&'static str] {
        match self {
            Self::Cluster => &["cluster", "clusters", "edgecluster", "edgeclusters", "ec"],
            Self::Tenant => &["tenant", "tenants", "tn"],
            Self::Deployment => &[
                "deployment",
                "deployments",
                "kryptondeployment",
                "kryptondeployments",
                "kd",
            ],
        }
    }

    /// Parses one of `kinds`. `form` is the index of the name that the help shows: 0 for singular, 1 for plural.
    fn parser(kinds: &[Self], form: usize) -> impl TypedValueParser<Value = Self> {
        let values = kinds.iter().map(|kind| {
            let names = kind.names();
            PossibleValue::new(names[form]).aliases(names)
        });
        PossibleValuesParser::new(values).map(|name| {
            let has_name = |kind: &Self| kind.names().contains(&name.as_str());
            let kind = Self::ALL.into_iter().find(has_name);
            kind.expect("the parser accepts only these names")
        })
    }

    pub(crate) fn singular(kinds: &[Self]) -> impl TypedValueParser<Value = Self> {
        Self::parser(kinds, 0)
    }

    pub(crate) fn plural(kinds: &[Self]) -> impl TypedValueParser<Value = Self> {
        Self::parser(kinds, 1)
    }

    pub(crate) fn resource(self) -> ApiResource {
        match self {
            Self::Cluster => ApiResource::erase::<EdgeCluster>(&()),
            Self::Tenant => ApiResource::erase::<Tenant>(&()),
            Self::Deployment => ApiResource::erase::<KryptonDeployment>(&()),
        }
    }

    /// The scope of this kind's objects: for a kind with namespaces the named one, or the one of the context.
    pub(crate) fn scope(self, namespace: Option<&str>, home: &Connection) -> Scope {
        match self {
            Self::Cluster => Scope::All,
            _ => Scope::Namespace(home.objects_namespace(namespace)),
        }
    }
}
