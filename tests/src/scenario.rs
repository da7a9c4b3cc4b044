//! Starts what most tests need: a chart with its values, a home cluster with its hub, and a member.

use anyhow::{Context, Result};

use crate::{
    chart_repository::{ChartRepository, ChartSource},
    cluster::{Cluster, Parts},
    fleet::{ValuesFile, chart_flags, values_flag},
    mode::Mode,
    pair::Pair,
};

/// A chart in its own repository, with an optional values file.
#[derive(Debug)]
pub struct ServedChart {
    pub repository: ChartRepository,
    name: String,
    version: String,
    values: Option<ValuesFile>,
}

impl ServedChart {
    /// Serves the small chart with these values. With `replicaCount: 0`, its Deployments have no pods.
    pub async fn small(values: &str) -> Result<Self> {
        let source = ChartSource::small("1.0.0");
        Self::new(source, ("small", "1.0.0"), Some(values)).await
    }

    /// Serves the chart from this source, which has this name and version.
    pub async fn new(
        source: ChartSource,
        (name, version): (&str, &str),
        values: Option<&str>,
    ) -> Result<Self> {
        Ok(Self {
            repository: ChartRepository::start(&[source]).await?,
            name: name.to_owned(),
            version: version.to_owned(),
            values: values.map(ValuesFile::new).transpose()?,
        })
    }

    /// Replaces the values.
    pub fn write(&self, values: &str) -> Result<()> {
        let file = self.values.as_ref();
        file.context("the chart has no values file")?.write(values)
    }

    /// Returns the hub's flags for this chart, followed by these flags.
    pub fn flags(&self, extra: &[&str]) -> Vec<String> {
        let mut flags = chart_flags(&self.repository, &self.name, &self.version);
        flags.extend(self.values.as_ref().map(values_flag));
        flags.extend(extra.iter().map(|flag| (*flag).to_owned()));
        flags
    }
}

/// Describes a home cluster with its hub and one member. By default, the member has controllers and no pods, and
/// installs the small chart without replicas.
#[derive(Debug)]
pub struct Scenario<'a> {
    name: &'a str,
    mode: Mode,
    parts: Parts,
    chart: Option<(ChartSource, &'a str)>,
    values: Option<&'a str>,
    flags: &'a [&'a str],
}

impl<'a> Scenario<'a> {
    /// Prefixes the names of the clusters with `name`.
    pub fn new(name: &'a str, mode: Mode) -> Self {
        Self {
            name,
            mode,
            parts: Parts::WithControllers,
            chart: None,
            values: None,
            flags: &[],
        }
    }

    /// Selects the parts of the member's cluster.
    #[must_use]
    pub fn parts(mut self, parts: Parts) -> Self {
        self.parts = parts;
        self
    }

    /// Installs version 1.0.0 of this chart instead. By default, it gets no values.
    #[must_use]
    pub fn chart(mut self, source: ChartSource, name: &'a str) -> Self {
        self.chart = Some((source, name));
        self
    }

    #[must_use]
    pub fn values(mut self, values: &'a str) -> Self {
        self.values = Some(values);
        self
    }

    /// Adds flags of the hub.
    #[must_use]
    pub fn flags(mut self, flags: &'a [&'a str]) -> Self {
        self.flags = flags;
        self
    }

    /// Starts everything, and joins the member.
    pub async fn start(self) -> Result<(Pair, ServedChart)> {
        let chart = match self.chart {
            Some((source, name)) => ServedChart::new(source, (name, "1.0.0"), self.values).await?,
            None => ServedChart::small(self.values.unwrap_or("replicaCount: 0")).await?,
        };
        let mut pair = Box::pin(Pair::start(self.name, self.mode, self.parts)).await?;
        Box::pin(pair.start_hub_and_join(chart.flags(self.flags))).await?;
        Ok((pair, chart))
    }
}

/// Starts the home cluster with these parts, and an edge cluster with controllers.
pub async fn home_and_edge(name: &str, home: Parts) -> Result<(Cluster, Cluster)> {
    let names = ["home", "edge"].map(|role| format!("{name}-{role}"));
    tokio::try_join!(
        Cluster::start(&names[0], home),
        Cluster::start(&names[1], Parts::WithControllers),
    )
}
